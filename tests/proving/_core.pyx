# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: nonecheck=False, cdivision=True, auto_pickle=False, freethreading_compatible=False
"""The engine with handles for tests: the product's own sources, and below them what disturbs the
ring and drives single rooms. `make proving` builds it beside the product, never instead of it."""

include "../../uringloop/_core.pyx"

cimport disturb

include "disturb.pxi"
include "rooms.pxi"
