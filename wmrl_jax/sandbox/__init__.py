"""Execution of programs: isolation, slots, the journalled queue, callbacks for compiled code."""
