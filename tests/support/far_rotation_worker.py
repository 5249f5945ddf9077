"""Compares a draft's rotation at the last of 2^20 positions: training's, SGLang's table, and fp64. Prints JSON. Started
by a test."""

POSITIONS = 2**20
