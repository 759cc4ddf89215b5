"""Extern declarations of disturb.h. No logic."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t


cdef extern from "ring/compat.h" nogil:
    enum disturb_kind:
        DISTURB_ANSWER
        DISTURB_SHORTEN
        DISTURB_REFUSE
        DISTURB_SPOIL

    struct disturb_rule:
        disturb_kind kind
        uint8_t opcode
        int32_t value
        uint32_t skip
        uint32_t times
        uint32_t one_in
        uint64_t done

    int DISTURB_RULES
    disturb_rule *disturb_rules
    unsigned disturb_rule_count
    uint64_t disturb_state

    void disturb_memory_begin(uint64_t first, uint64_t last)
    uint64_t disturb_memory_end()

    enum:
        IORING_OP_CONNECT
