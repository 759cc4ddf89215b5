"""The scenarios: `await run(run)` of each module, with a soak.run.Run."""

# name: (what it is about, its share of the time)
SCENARIOS = {
    "crowd": ("10,000 connections at once, 1 B to 256 KiB", 2),
    "fairness": ("a trickle beside floods and slow consumers", 2),
    "churn": ("connections made and ended in all manners", 3),
    "streams": ("readers and writers, reads cancelled by chance", 1),
    "tls": ("TLS handshakes beside one long connection", 1),
    "timers": ("timers, cancels, callbacks from threads", 1),
    "sock": ("sock_* with cancels by chance", 1),
    "chaos": ("through a proxy that delays, splits, resets", 1),
    "netns": ("between network namespaces that lose packets", 1),
    "processes": ("child processes and pipes", 1),
}
