"""The world model: executed cases, scoring by a forward pass, tuning, fidelity."""
