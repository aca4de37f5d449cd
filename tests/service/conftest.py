"""Fixtures of these tests: real etcd servers, and folders, tokens and settings that no two tests share."""

from environment_support import own_environment
from etcd_for_tests import each_client, etcd, etcd_of_three
from store_support import opened

__all__ = ["each_client", "etcd", "etcd_of_three", "opened", "own_environment"]
