"""Every setting of a run: fields, ranges, combinations, who hosts whom."""
