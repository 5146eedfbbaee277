"""The order of samples and the loader's state, without a store."""

import pytest

from jigsaw.errors import StateError
from jigsaw.io.datasets.samples import LoaderState, SampleOrder, shuffled_sample


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 257])
def test_a_shuffle_is_a_permutation_of_its_own(count):
    orders = {
        tuple(shuffled_sample(i, count, seed, epoch) for i in range(count)) for seed in range(3) for epoch in range(3)
    }
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(orders) == 9 or count < 16


def test_a_shuffle_is_fair():
    first = [shuffled_sample(0, 7, seed, 0) for seed in range(7000)]
    assert all(850 < first.count(sample) < 1150 for sample in range(7))
    neighbors = sum(
        shuffled_sample(i + 1, 100, seed, 0) - shuffled_sample(i, 100, seed, 0) == 1
        for seed in range(50)
        for i in range(99)
    )
    assert neighbors < 100  # one in a hundred by chance: 50


def test_a_shuffle_never_changes_between_versions():
    assert [shuffled_sample(i, 10, seed=3, epoch=1) for i in range(10)] == [4, 7, 8, 9, 6, 5, 2, 3, 1, 0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_an_epoch_hands_out_each_sample_once_and_resumes_anywhere(shuffle, drop_last, sizes):
    order = SampleOrder(10, 4, shuffle, drop_last)
    batches = list(order.batches(LoaderState(seed=5)))
    assert [len(samples) for samples, _ in batches] == sizes
    assert len({s for samples, _ in batches for s in samples}) == sum(sizes)
    assert batches[-1][1] == LoaderState(5, 1, 0)
    _, after_one = batches[0]
    assert list(order.batches(after_one)) == batches[1:]
    torn_apart = SampleOrder(10, 3, shuffle, False).batches(after_one)
    rest = [s for samples, _ in order.batches(after_one) for s in samples]
    assert [s for samples, _ in torn_apart for s in samples][: len(rest)] == rest


def test_only_the_tail_is_dropped_after_another_batch_size():
    rest = [samples for samples, _ in SampleOrder(10, 4, False, True).batches(LoaderState(0, 2, 2, 10))]
    assert rest == [(2, 3, 4, 5), (6, 7, 8, 9)]


def test_a_place_in_the_dropped_tail_is_the_next_epoch():
    assert SampleOrder(10, 4, False, True).settled(LoaderState(0, 2, 9, 10)) == LoaderState(0, 3, 0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"seed": 0, "epoch": 1}, r"has the keys \['seed', .*, but got \['epoch', 'seed'\]"),
        ({"seed": 0, "epoch": 1, "next_sample": 2, "rank": 1}, "has the keys"),
        ({"seed": 0, "epoch": None, "next_sample": 2}, "but got epoch=None; the checkpoint is torn"),
        ({"seed": 0, "epoch": -1, "next_sample": 2.0}, r"epoch=-1, next_sample=2\.0"),
        ({"seed": 0, "epoch": 1, "next_sample": 2}, "samples=0; save what loader.state_dict"),
        ({"seed": 0, "epoch": 1, "next_sample": 2, "samples": 9}, "the dataset has 10 samples, in another order"),
        (None, "but got NoneType"),
    ],
)
def test_a_torn_state_is_refused(given, match):
    with pytest.raises(StateError, match=match):
        LoaderState.from_dict(given, 10)


def test_a_state_survives_its_dict():
    assert LoaderState.from_dict(LoaderState(1, 2, 3, 10).as_dict(), 10) == LoaderState(1, 2, 3, 10)
