"""What runs inside the isolation: the supervisor of one slot. Standard library only.

This folder alone is bound into a sandbox, and started there as `python <folder>`; nothing here
may import the rest of the package.
"""
