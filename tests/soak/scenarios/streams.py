"""asyncio's streams: echo through readers and writers, with reads that are cancelled by chance."""

import asyncio

from soak.content import LONGEST, ContentFault, Stream
from soak.run import side_by_side

AT_ONCE = 32
LARGEST = 400_000       # bytes of one connection, each way
LIMIT = 60.0            # seconds until a connection counts as hung


async def echo(run, reader, writer):
    """The server's side: sends back what comes, to the end."""
    while data := await some(run, reader):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
    writer.close()
    await writer.wait_closed()


async def some(run, reader):
    """Up to so many bytes, in one of the manners; a read that was cancelled took nothing."""
    limit = run.rng.choice((1, 100, 5_000, 65_536))
    while True:
        task = asyncio.ensure_future(reader.read(limit))
        if run.rng.random() < 0.1:
            await asyncio.wait({task}, timeout=run.rng.choice((0, 0.001)))
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            return task.result()
        run.count("cancels")


async def send(run, writer, stream, size):
    while size:
        piece = min(size, run.rng.randint(1, run.rng.choice((100, 20_000, LONGEST))))
        writer.write(stream.take(piece))
        await writer.drain()
        size -= piece
    writer.write_eof()


async def receive(run, reader, stream, size):
    """Verifies `size` bytes and the end after them."""
    while size:
        if run.rng.random() < 0.3:
            data = await reader.readexactly(min(size, run.rng.randint(1, 50_000)))
        else:
            data = await some(run, reader)
        run.count("messages")
        run.count("bytes", len(data))
        stream.verify(data)
        size -= len(data)
        if not data:
            return run.lost(size, f"the last {size} bytes of a stream")
    if await reader.read(1):
        run.fault("more came than was sent")


async def run(run):
    loop = asyncio.get_running_loop()
    served = set()

    def accepted(reader, writer):
        task = loop.create_task(echo(run, reader, writer))
        served.add(task)
        task.add_done_callback(served.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, backlog=256)
    address = server.sockets[0].getsockname()

    async def one():
        key, size = run.new_key(), run.rng.randint(1, LARGEST)
        try:
            async with asyncio.timeout(LIMIT):
                reader, writer = await asyncio.open_connection(*address)
                run.count("connections")
                sending = loop.create_task(send(run, writer, Stream(key), size))
                await receive(run, reader, Stream(key), size)
                await sending
                writer.close()
                await writer.wait_closed()
        except TimeoutError:
            run.lost(1, f"the end of stream {key} of {size} bytes")
        except (ContentFault, asyncio.IncompleteReadError) as fault:
            run.lost(1, f"a stream: {fault}")

    await side_by_side(run, AT_ONCE, one)
    if served:
        await asyncio.wait(served, timeout=LIMIT)
    if served:
        run.lost(len(served), "the ends of streams on the server's side")
    server.close()
    await server.wait_closed()
    run.figures["streams"] = f"{run.counts['cancels']:,} reads cancelled"
