"""The paper's figures, a function each: `benchmarks.chaos_paper` runs them and sets them beside what is claimed."""
