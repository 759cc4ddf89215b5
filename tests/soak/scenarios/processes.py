"""Child processes and pipes: what goes in comes out, exit statuses are theirs, nothing is left."""

import asyncio
import os
import signal

from soak.content import ContentFault, Stream
from soak.run import side_by_side

AT_ONCE = 6
LARGEST = 200_000       # bytes through one child or pipe


def compare(run, stream, data, size, what):
    """The whole output of a child or a pipe, against the stream that went in."""
    run.count("bytes", len(data))
    try:
        stream.verify(data)
    except ContentFault as fault:
        run.fault(f"{what}: {fault}")
    if len(data) != size:
        run.lost(size - len(data), f"{what}: {len(data)} of {size} bytes")


async def copied(run, key, size):
    """cat: all that is written to it comes back."""
    child = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate(Stream(key).take(size))
    compare(run, Stream(key), output, size, "cat")
    if child.returncode:
        run.fault(f"cat ended with {child.returncode}")


async def told(run, key, size):
    """Both outputs at once, and the exit status."""
    status = key % 200
    child = await asyncio.create_subprocess_shell(
        f"printf {key}; printf {size} >&2; exit {status}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    outputs = await child.communicate()
    if outputs != (str(key).encode(), str(size).encode()) or child.returncode != status:
        run.lost(1, f"output or status of a shell: {outputs}, {child.returncode} is not "
                 f"{key}, {size}, {status}")


async def killed(run, key, size):
    """A child that would stay is killed, with input on its way."""
    child = await asyncio.create_subprocess_exec(
        "sleep", "1000", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    child.stdin.write(Stream(key).take(size))
    await asyncio.sleep(run.rng.choice((0, 0.01)))
    child.kill()
    if await child.wait() != -signal.SIGKILL:
        run.fault(f"killed, but its status is {child.returncode}")
    child.stdin.close()
    try:
        await child.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass                            # that is how the pipe of a killed reader ends


async def piped(run, key, size):
    """connect_write_pipe to connect_read_pipe."""
    loop = asyncio.get_running_loop()
    ends = [os.fdopen(fd, mode, 0) for fd, mode in zip(os.pipe(), ("rb", "wb"))]
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), ends[0])
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, ends[1])
    transport.write(Stream(key).take(size))
    transport.write_eof()
    compare(run, Stream(key), await reader.read(), size, "pipe")


async def run(run):
    number = dict.fromkeys((copied, told, killed, piped), 0)

    async def one():
        work = run.rng.choice(list(number))
        await work(run, run.new_key(), run.rng.randint(1, LARGEST))
        number[work] += 1
        run.count("messages")

    await side_by_side(run, AT_ONCE, one)
    run.figures["processes"] = ", ".join(f"{count:,} {work.__name__}"
                                         for work, count in number.items())
