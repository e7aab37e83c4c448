"""Where privacy happens: clip, sum, noise, and what may be coarser before or after."""
