"""The paper's method: pure functions of arrays, without model, files or clock."""
