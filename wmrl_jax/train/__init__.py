"""The compiled step, the loop around it, and everything that a run writes."""
