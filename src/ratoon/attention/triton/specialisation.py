"""Which integers of a launch follow its layout: Triton compiles nothing anew for them.

It would otherwise compile a kernel once for numbers that 16 divides, once for others and once for 1. Of four numbers
that is up to 81 times, each of which holds a run up for seconds when it comes up.
"""

FOLLOWS_LAYOUT = ["T", "num_items", "num_tiles", "stride_lh", "stride_mh", "stride_plh"]
"""Names, the same in all kernels of attention: rows, items, tiles, and the lengths of lines of numbers of rows."""
