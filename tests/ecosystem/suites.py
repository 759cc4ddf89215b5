"""The suites of other projects: which sdist, what it needs, which of its files are about a loop.

Tests that fail on asyncio as well need no entry anywhere. `deselect` and `select` leave out what
would only cost time: other event loops, networks that a test machine does not have.
"""

from conform.suite import Suite

from . import services

ASYNCIO = ("pytest_asyncio.plugin",)
ANYIO = ("anyio",)

SUITES = (
    Suite(
        name="uvloop",
        about="uvloop's own tests: the loop's, and the asyncio side of its TCP, TLS and UDP tests",
        project="uvloop",
        version="0.23.0",
        sha256="28d160f51ab4da3b187063652e643dea6831072add4adc1e6d62afbe73b6be27",
        files=("tests/test_*.py",),
        # Of uvloop's sources and internals.
        without=("tests/test_sourcecode.py", "tests/test_libuv_api.py", "tests/test_cython.py",
                 "tests/test_testbase.py", "tests/test_dealloc.py", "tests/test_fs_event.py"),
        deselect=("test_socket_connect_and_close",),    # hangs on asyncio, which it is not for
        requires=("aiohttp", "psutil", "pyOpenSSL"),
        plugins=("conform_uvloop",),
        ini="",
        settings=("python_classes=", "python_functions="),
        limit=90,
    ),
    Suite(
        name="anyio",
        about="anyio on its asyncio backend",
        project="anyio",
        version="4.16.0",
        sha256="59bb03251907983d1603d27c3087ddb1e93299ea2163adcdba37899a4fb12ffb",
        files=("tests/**/test_*.py",),
        requires=("blockbuster", "exceptiongroup", "hypothesis", "psutil", "pytest-mock",
                  "pytest-timeout", "trio", "trustme", "uvloop"),
        plugins=("anyio", "pytest_mock", "pytest_timeout"),
        localhost=True,
        select="not uvloop and not trio",
    ),
    Suite(
        name="uvicorn",
        about="uvicorn, the server and its protocols",
        project="uvicorn",
        version="0.54.0",
        sha256="a2e33cbfaa0306f8e6b0c13e0cb89d7d7a2da3e62b90c66e18c33d9807b28620",
        files=("tests/test_*.py", "tests/protocols/test_*.py", "tests/supervisors/test_*.py",
               "tests/middleware/test_*.py"),
        requires=("a2wsgi", "cryptography", "httptools", "httpx", "httpx2", "pytest-mock",
                  "python-dotenv",
                  "PyYAML", "trustme", "uvloop", "watchfiles", "websockets", "wsproto"),
        plugins=("anyio", "pytest_mock"),
        select="not trio",
    ),
    Suite(
        name="httpcore",
        about="httpcore, its asynchronous half",
        project="httpcore",
        version="1.0.9",
        sha256="6e34463af53fd2ab5d807f399a9b45ea31c3dfa2276f15a2c3f00afff6e176e8",
        files=("tests/_async/test_*.py", "tests/test_cancellations.py"),
        requires=("anyio", "h2", "pytest-httpbin", "socksio", "trio"),
        plugins=("anyio", "pytest_httpbin.plugin"),
        settings=("markers=copied_from\ntrio",),  # pytest-trio would define the second
        select="not trio",
    ),
    Suite(
        name="redis",
        about="redis-py's asynchronous client and a redis-server",
        project="redis",
        version="8.1.0",
        sha256="6e1a19beef9225c83efd689c7e6b7da2d5215b1f42cd13b7fc3714d0a09c7b25",
        files=tuple(f"tests/test_asyncio/test_{name}.py" for name in (
            "client", "commands", "connect", "connection", "connection_pool", "cwe_404",
            "encoding", "hash", "keyspace_notifications", "lock", "monitor", "pipeline",
            "pubsub", "retry", "scripting", "usage_counter")),
        requires=("cryptography", "pytest-asyncio", "pytest-timeout"),
        plugins=(*ASYNCIO, "pytest_timeout"),
        select="not onlycluster",
        service=services.redis_server,
        missing=services.no_redis_server,
    ),
    Suite(
        name="janus",
        about="janus, a queue between threads and tasks",
        project="janus",
        version="2.0.0",
        sha256="0970f38e0e725400496c834a368a67ee551dc3b5ad0a257e132f5b46f2e77770",
        files=("tests/test_*.py",),
        without=("*benchmarks*",),
        ini="setup.cfg",
        requires=("pytest-asyncio",),
        plugins=ASYNCIO,
    ),
    Suite(
        name="asgiref",
        about="asgiref, sync code in threads of a loop and back",
        project="asgiref",
        version="3.13.0",
        sha256="034cc8cbf72d00553b4be256703ac545120b4e50af13b49dec99da899aeeecb4",
        files=("tests/test_*.py",),
        ini="setup.cfg",
        requires=("pytest-asyncio",),
        plugins=ASYNCIO,
    ),
    Suite(
        name="aioquic",
        about="aioquic, QUIC over datagram transports",
        project="aioquic",
        version="1.7.2",
        sha256="4def7cb0a692dc12c995cc397a93f41b78cc30b7bf078769c3a3bb1ba9dcf362",
        files=("tests/test_asyncio.py",),
        requires=("cryptography",),
    ),
    Suite(
        name="tornado",
        about="tornado, which drives sockets itself by add_reader() and add_writer()",
        project="tornado",
        version="6.6.1",
        sha256="28e6311402af59c8b02e3fa0f5e7d8eb465b25081381803b127d97e6a4395d5a",
        unpack=("tornado/test",),
        ini="",
        files=tuple(f"tornado/test/{name}_test.py" for name in (
            "asyncio", "auth", "circlerefs", "concurrent", "gen", "httpclient", "httpserver",
            "ioloop", "iostream", "locks", "netutil", "process", "queues", "routing",
            "simple_httpclient", "tcpclient", "tcpserver", "testing", "web", "websocket",
            "wsgi")),
        plugins=("conform_tornado",),
    ),
    Suite(
        name="asyncssh",
        about="AsyncSSH: connections, channels, forwarding, processes and pipes",
        project="asyncssh",
        version="2.24.1",
        sha256="efcd36e9b35f79873535b06444a7c9b0a3c61d97081b208c7fdd3fd8a40f1eca",
        files=tuple(f"tests/test_{name}.py" for name in (
            "agent", "channel", "connection", "forward", "process", "stream", "x11")),
        deselect=("_TestCanonicalizeHost",),    # asks for names that only a network resolves
        limit=30,   # asyncio itself waits for ever at the end of two classes of test_connection.py
        requires=("bcrypt",),
        ini="",
    ),
)
