"""Clocks of processes that step."""

# A `sitecustomize` module: Python's clocks of a process and its children are ahead by
# what the file $CLOCK_STEP says.
STEPPED_CLOCK = """
import datetime, os, pathlib, time

real_time, real = time.time, datetime.datetime

def step():
    try:
        return float(pathlib.Path(os.environ["CLOCK_STEP"]).read_text())
    except (OSError, ValueError):
        return 0.0

class Meta(type):
    def __instancecheck__(cls, value):
        return isinstance(value, real)

class Stepped(real, metaclass=Meta):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=step())

time.time = lambda: real_time() + step()
datetime.datetime = Stepped
"""
