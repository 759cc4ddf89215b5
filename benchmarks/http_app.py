"""The aiohttp application of the HTTP demo: GET / answers a short text."""

TEXT = "Hello from an asyncio event loop.\n"


async def start_http() -> tuple[list, object]:
    """Start the application; returns ([host, port], what has to be kept alive)."""
    from aiohttp import web  # here: only this server needs aiohttp to be installed

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=TEXT)

    application = web.Application()
    application.router.add_get("/", hello)
    # No access log: it would be measured in place of the loop.
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    host, port = runner.addresses[0][:2]
    return [host, port], (runner, site)
