"""The command line: flags and help; no work."""

import sys

from fedgs.process import end_on_signals

# Here, for the commands take seconds to be imported: it has nothing to finish yet.
if sys.argv[1:3] == ["deploy", "client"]:
    end_on_signals()
