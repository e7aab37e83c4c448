"""What people see: command line, report, evaluation; alone in knowing a terminal."""
