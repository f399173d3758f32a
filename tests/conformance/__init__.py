"""Lightning's own tests, run with EntrainStrategy; see run.py. Not part of the test suite."""
