"""Hydra groups of chaos-lightning: `pkg://chaos_lightning.configs`.

The YAML files hold choices; `schema.py` holds the types that they are checked against. Importing this package makes the
types known to Hydra, and reading a file through `pkg://` imports it, so nobody has to call anything.
"""

if __name__ != "chaos_lightning.configs":
    raise ImportError(
        f"this folder was imported as {__name__!r}; write `import chaos_lightning.configs`, or for Hydra "
        "`pkg://chaos_lightning.configs` (the folder at the root of the repository is the same one, under a name that "
        "would load it twice)"
    )

from chaos_lightning.configs.schema import register

register()
