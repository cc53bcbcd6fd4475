"""numpy's BLAS computes in one thread, if this is imported before numpy: the threads of several
processes that run tests would wait for each other, with small matrices most of the time.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
