"""loop.sock_*: byte streams, datagrams and accepts whose calls are cancelled by chance.

A receive that was cancelled has taken nothing: the next one gets it. A send that was cancelled has
sent any beginning of its bytes.
"""

import asyncio
import contextlib
import socket

from soak.content import LONGEST, ContentFault, Stream
from soak.run import side_by_side

AT_ONCE = 16
LARGEST = 400_000       # bytes of one stream
LIMIT = 60.0            # seconds until a call counts as hung
CANCELLED = object()


async def perhaps(run, call, share=0.3):
    """The result of a call, or CANCELLED: by chance, after a moment by chance."""
    if run.rng.random() > share:
        async with asyncio.timeout(LIMIT):
            return await call
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=run.rng.choice((0, 0, 0.0005, 0.003)))
    task.cancel()
    await asyncio.wait({task})
    run.count("cancels", task.cancelled())
    return CANCELLED if task.cancelled() else task.result()


async def send(run, sock, stream, size):
    """Sends; the last piece may be cancelled. The least that arrives."""
    loop = asyncio.get_running_loop()
    sure = 0
    while sure < size:
        piece = min(size - sure, run.rng.randint(1, run.rng.choice((500, 20_000, LONGEST))))
        share = 0.5 if sure + piece == size else 0
        if await perhaps(run, loop.sock_sendall(sock, stream.take(piece)), share) is CANCELLED:
            break
        sure += piece
        if run.rng.random() < 0.3:      # so that receives wait, and can be cancelled then
            await asyncio.sleep(run.rng.choice((0, 0.0005, 0.002)))
    sock.shutdown(socket.SHUT_WR)
    return sure


async def receive(run, sock, stream):
    """Receives to the end, in all manners; how many bytes came."""
    loop = asyncio.get_running_loop()
    buffer = bytearray(LONGEST)
    came = 0
    while True:
        limit = run.rng.choice((1, 100, 5_000, 16_384, LONGEST))
        if run.rng.random() < 0.5:
            data = await perhaps(run, loop.sock_recv(sock, limit))
        else:
            size = await perhaps(run, loop.sock_recv_into(sock, memoryview(buffer)[:limit]))
            data = size if size is CANCELLED else bytes(buffer[:size])
        if data is CANCELLED:
            continue
        run.count("messages")
        run.count("bytes", len(data))
        if len(data) > limit:
            run.fault(f"sock_recv: {len(data)} bytes for {limit}")
        if not data:
            return came
        stream.verify(data)
        came += len(data)


async def talk(run, address, waiting):
    """One connection, bytes in both directions at once. waiting: accepted ends by address."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(socket.socket())
        ours.setblocking(False)
        await loop.sock_connect(ours, address)
        run.count("connections")
        accepted = waiting.setdefault(ours.getsockname(), loop.create_future())
        await asyncio.wait({accepted}, timeout=LIMIT)
        if not accepted.done():
            return run.lost(1, "a connection that no sock_accept() returned")
        peer = stack.enter_context(accepted.result())
        del waiting[ours.getsockname()]
        key = run.new_key()
        sizes = [run.rng.randint(1, LARGEST) for _ in range(2)]
        jobs = [send(run, ours, Stream(2 * key), sizes[0]),
                send(run, peer, Stream(2 * key + 1), sizes[1]),
                receive(run, peer, Stream(2 * key)), receive(run, ours, Stream(2 * key + 1))]
        results = await _all(run, jobs)
        for sent, came, size in zip(results[:2], results[2:], sizes):
            if not sent <= came <= size:
                run.lost(sent - came, f"{came} bytes came, {sent} to {size} were sent")


async def _all(run, jobs):
    """The results of the jobs, side by side; none when one of them failed, which is a fault."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except* ContentFault as faults:
        run.lost(1, f"a stream after cancelled calls: {faults.exceptions[0]}")
    except* TimeoutError:
        run.lost(1, f"a call did not end within {LIMIT:.0f} s")
    if any(task.cancelled() or task.exception() for task in tasks):
        return []
    return [task.result() for task in tasks]


async def accept(run, listener, waiting):
    """Accepts for ever, with cancels."""
    loop = asyncio.get_running_loop()
    while True:
        # Without perhaps(): nobody may connect for longer than its limit.
        task = asyncio.ensure_future(loop.sock_accept(listener))
        try:
            await asyncio.wait({task}, timeout=run.rng.choice((0, 0.0005, 0.003)))
        finally:
            task.cancel()
        await asyncio.wait({task})
        run.count("cancels", task.cancelled())
        if not task.cancelled():
            sock, address = task.result()
            waiting.setdefault(address, loop.create_future()).set_result(sock)


async def datagrams(run):
    """A datagram there and back at a time, with cancels in between: none is lost on loopback."""
    loop = asyncio.get_running_loop()
    with socket.socket(type=socket.SOCK_DGRAM) as left, \
            socket.socket(type=socket.SOCK_DGRAM) as right:
        for sock in (left, right):
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
        for _ in range(50):
            data = Stream(run.new_key()).take(run.rng.randint(1, 8_000))
            for source, sink in ((left, right), (right, left)):
                try:
                    await loop.sock_sendto(source, data, sink.getsockname())
                except NotImplementedError:
                    run.note(f"sock: no datagrams, {run.kind} has no sock_sendto()")
                    return await asyncio.sleep(0.01)
                came = CANCELLED
                while came is CANCELLED:
                    came = await perhaps(run, loop.sock_recvfrom(sink, 65_536))
                run.count("messages")
                run.count("bytes", len(data))
                if came != (data, source.getsockname()):
                    run.lost(1, "a datagram")


async def run(run):
    loop = asyncio.get_running_loop()
    waiting = {}
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        listener.setblocking(False)
        accepting = loop.create_task(accept(run, listener, waiting))

        async def one():
            if run.rng.random() < 0.1:
                await datagrams(run)
            else:
                await talk(run, listener.getsockname(), waiting)

        try:
            await side_by_side(run, AT_ONCE, one)
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})
    if waiting:
        run.lost(len(waiting), "accepted connections that nobody made")
    run.figures["sock"] = f"{run.counts['cancels']:,} calls cancelled"
