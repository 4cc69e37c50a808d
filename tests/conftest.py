"""What holds for every test: one thread inside each op, and no time limit on an example."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

settings.register_profile("twobw", settings(), deadline=None)  # keeps what CI=true sets
settings.load_profile("twobw")
