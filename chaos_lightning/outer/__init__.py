"""Outer sync: clusters that are far apart train one model by a parameter server (Di-PS); rules: docs/outer.md."""
