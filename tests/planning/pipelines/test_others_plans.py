"""Tests the policies that imitate other systems: each takes the plan that the imitation makes."""

import pytest
from paper_jobs import job_of

from chaos_lightning.planning.pipelines.formation import EqualFleet, EqualOptions
from chaos_lightning.planning.pipelines.paper import algorithm1
from chaos_lightning.planning.pipelines.templates import oobleck, symmetric


@pytest.fixture
def options():
    """Returns the options of a fleet of eight devices that has lost one; pipelines need at least two stages."""
    fleet = EqualFleet(job_of(8, 16, 32, room=31))
    return EqualOptions(fleet=fleet, before=fleet.formation("best", 8).without([0]), devices=7)


def test_algorithm_1_stays_near_the_shape_before(options):
    shapes = options.fleet.shapes
    assert options.move("algorithm1").plan.shape == algorithm1(shapes, 7, options.before.shape)
    # Four pipelines stood before, and three of two stages do not go on four devices.
    fewer = EqualOptions(fleet=options.fleet, before=options.before, devices=4)
    assert fewer.move("algorithm1") is None
    assert options.fleet.formation("algorithm1", 4).shape == algorithm1(shapes, 4, None)


def test_templates_and_rectangles(options):
    shapes = options.fleet.shapes
    assert options.move("oobleck").plan.shape == oobleck(shapes, 7, 1)
    assert options.restart("symmetric").plan.shape == symmetric(shapes, 7)
    # Three devices cannot hold two copies of layers of which none holds all.
    assert EqualOptions(fleet=options.fleet, before=options.before, devices=3).move("oobleck") is None
