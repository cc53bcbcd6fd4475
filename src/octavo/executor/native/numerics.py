"""The version of the native executor's numerics, which is part of every cached block's name."""

# Raise this whenever a change can alter a bit of a block for the same weights, tokens and
# instruction-set tier: in kernels and their order of operations, in compiler flags, in lowering, in
# what a model family's Program computes, in how a loader reads or converts weights, or in the
# packing of blocks. Blocks in caches on disk then have other names and are not found any more. A
# change that leaves all bits as they are does not raise it (tests/engine/test_same_bits.py,
# tests/oracle).
NUMERICS_VERSION = 1
