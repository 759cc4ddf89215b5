"""The applications of the HTTP demo: GET / answers a short text, on aiohttp and on uvicorn."""

import asyncio
import importlib.util

from benchmarks.echo_servers import BACKLOG, EchoConfig, bound_socket

TEXT = "Hello from an asyncio event loop.\n"

PACKAGES = {"aiohttp": ("aiohttp",), "uvicorn": ("uvicorn", "httptools")}
"""What each application needs to be installed."""


def missing_reason(app: str) -> str | None:
    """Why an application can't be served here; None when its packages are installed."""
    missing = [name for name in PACKAGES[app] if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(missing)}" if missing else None


async def start_aiohttp() -> tuple[list, object]:
    """Start the aiohttp application; returns ([host, port], what has to be kept alive)."""
    from aiohttp import web  # here: only this server needs aiohttp to be installed

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=TEXT)

    application = web.Application()
    application.router.add_get("/", hello)
    # No access log: it would be measured in place of the loop.
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG)
    await site.start()
    host, port = runner.addresses[0][:2]
    return [host, port], (runner, site)


async def hello_asgi(scope: dict, receive: object, send: object) -> None:
    """The ASGI application: one answer for every request."""
    body = TEXT.encode()
    length = (b"content-length", b"%d" % len(body))
    headers = [(b"content-type", b"text/plain; charset=utf-8"), length]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def start_uvicorn() -> tuple[list, object]:
    """Start the ASGI application on uvicorn with httptools, inside the running loop."""
    import uvicorn

    listener = bound_socket(EchoConfig("protocol", "tcp", 0))
    address = list(listener.getsockname())
    # As `uvicorn --no-access-log --http httptools`; `interface` and `lifespan` spare it guesses.
    config = uvicorn.Config(
        hello_asgi, http="httptools", ws="none", lifespan="off", interface="asgi3",
        log_level="warning", access_log=False, backlog=BACKLOG,
    )  # fmt: skip
    server = uvicorn.Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
            raise RuntimeError("uvicorn ended before it served")
        await asyncio.sleep(0.01)
    return address, (task, listener)
