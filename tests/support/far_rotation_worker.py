"""The rotation of a draft at the last of 2^20 positions: training's, SGLang's table, and fp64. Prints JSON; started by
a test."""

POSITIONS = 2**20
