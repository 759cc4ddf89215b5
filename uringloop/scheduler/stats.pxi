# Counters behind loop.stats().
#
# Owner: the LoopCore. The rooms count where things happen; this file only reads.

cdef struct Counters:
    uint64_t ticks
    uint64_t polls
    uint64_t bytes_received
    uint64_t bytes_sent
    uint64_t messages_copied
    uint64_t messages_fed
    uint64_t mode_switches


cdef dict read_counters(LoopCore loop):
    """All counters by the names of uringloop.LoopStats."""
    cdef Ring ring = loop.ring
    cdef BufferRing buffers = ring.buffers if ring is not None else None
    return {
        "ticks": loop.counters.ticks,
        "polls": loop.counters.polls,
        "spins": loop.waiting.spins,
        "spins_paid": loop.waiting.spins_paid,
        "enters": ring.enters if ring is not None else 0,
        "submissions": ring.submissions if ring is not None else 0,
        "completions": ring.completions if ring is not None else 0,
        "in_flight": ring.in_flight if ring is not None else 0,
        "buffers": buffers.count if buffers is not None else 0,
        "buffers_lent": buffers.lent if buffers is not None else 0,
        "buffers_ran_dry": ring.buffers_ran_dry if ring is not None else 0,
        "overflows": ring.overflows if ring is not None else 0,
        "bytes_received": loop.counters.bytes_received,
        "bytes_sent": loop.counters.bytes_sent,
        "messages_copied": loop.counters.messages_copied,
        "messages_fed": loop.counters.messages_fed,
        "messages_handed_over": buffers.handed_over if buffers is not None else 0,
        "mode_switches": loop.counters.mode_switches,
        "zerocopy_sends": ring.zerocopy_sends if ring is not None else 0,
        "zerocopy_copied": ring.zerocopy_copied if ring is not None else 0,
        "zerocopy_pending": ring.loans if ring is not None else 0,
        "operations": loop.operations.occupied,
    }
