"""Cells of a table: runs that are trained once, stored, resumed, judged, printed."""
