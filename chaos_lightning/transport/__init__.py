"""Implements links between members: frames, checksums and encryption, authenticated dialling, and the epoll loop that
serves them.
"""
