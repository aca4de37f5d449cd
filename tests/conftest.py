"""For all tests: a generated example that takes long on a busy machine is no failure; nothing here is timed."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
