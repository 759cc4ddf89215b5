"""What is printed at the end: a table for each loop, figures, and every failed check."""

from benchmarks import table

OURS = ("io_uring", "epoll")
TOLD = 5            # faults of a scenario; the JSON report has more
HEADERS = ["scenario", "s", "connections", "messages", "MiB verified", "lost", "leaked",
           "memory", "checks"]


def _row(result):
    counts = result["counts"]
    return [
        result["scenario"],
        f"{result['seconds']:.0f}",
        f"{counts.get('connections', 0):,}",
        f"{counts.get('messages', 0):,}",
        f"{counts.get('bytes', 0) / 2**20:,.0f}",
        f"{counts.get('lost', 0):,}",
        f"{counts.get('leaked', 0):,}",
        f"{counts.get('rss_growth', 0) / 2**20:+.1f} MiB",
        "failed" if counts.get("faults") else "passed" if counts else "",
    ]


def _total(results):
    ran = [result for result in results if not result["not_run"]]
    names = {name for result in ran for name in result["counts"]}
    counts = {name: sum(result["counts"].get(name, 0) for result in ran) for name in names}
    return _row({"scenario": "all", "seconds": sum(result["seconds"] for result in ran),
                 "counts": counts})


def text_of(results):
    """(text, True when no check failed on uringloop). Peers may fail: they are compared only."""
    lines = []
    for kind in dict.fromkeys(result["kind"] for result in results):
        own = [result for result in results if result["kind"] == kind]
        rows = [[result["scenario"], f"not run: {result['not_run']}"] if result["not_run"]
                else _row(result) for result in own]
        lines += ["", kind, table.render(HEADERS, [*rows, _total(own)]), ""]
        lines.append("  of the second part of each scenario (memory while idle: of the first):")
        lines += [f"  {result['scenario']}: {text}" for result in own
                  for text in result["figures"].values()]
        lines += [f"  note: {text}" for result in own for text in result["notes"]]
    failed = [result for result in results if result["counts"].get("faults")]
    ours = [result for result in failed if result["kind"] in OURS]
    for result in failed:
        peers = "" if result in ours else " (a peer: told, not counted)"
        lines += ["", f"FAILED: {result['scenario']} on {result['kind']}{peers}, "
                  f"{result['counts']['faults']} faults; again: make soak "
                  f"KINDS={result['kind']} SEED={result['seed']} "
                  f"SOAK_ARGS='--scenarios {result['scenario']}'"]
        lines += [f"  {text}" for text in result["faults"][:TOLD]]
    if ours:
        lines += ["", f"{len(ours)} of {sum(r['kind'] in OURS for r in results)} failed"]
    else:
        kinds = dict.fromkeys(result["kind"] for result in results
                              if result["kind"] in OURS and not result["not_run"])
        lines += ["", f"nothing lost, nothing leaked on {' and '.join(kinds)}" if kinds else
                  "uringloop was not run"]
    return "\n".join(lines), not ours
