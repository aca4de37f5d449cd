"""Functions that make the paper's figures: `benchmarks.chaos_paper` runs them and compares them with the paper's
claims.
"""
