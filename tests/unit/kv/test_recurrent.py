"""The pool of recurrent states: zero at first, copied and cleared slot by slot."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.errors import ConfigError
from thermocline.kernels.delta_contract import DeltaShape
from thermocline.kv.recurrent import StatePool, clear_state, copy_state
from thermocline.messages import LayerIndex

SHAPE = DeltaShape(2, 4, 8, 16, 4, tiled=True).state


def test_layers_have_states_of_their_own():
    """Only those that were named; shapes and bytes are the rule's."""
    pool = StatePool(3, {LayerIndex(0): SHAPE, LayerIndex(2): SHAPE})
    states = pool.layer(LayerIndex(2))
    assert states.conv.shape == (3, 3, 96)
    assert states.recurrent.shape == (3, 4, 8, 16)
    assert pool.slot_bytes == 2 * 4 * (3 * 96 + 4 * 8 * 16)
    assert not states.recurrent.any()
    with pytest.raises(KeyError):
        pool.layer(LayerIndex(1))
    assert repr(pool) == "StatePool(2 layers, 3 slots)"


def test_a_copy_is_whole_and_apart():
    """What happens to a sequence later does not reach its snapshot."""
    states = StatePool(2, {LayerIndex(0): SHAPE}).layer(LayerIndex(0))
    states.conv[0], states.recurrent[0] = 1.0, 2.0
    copy_state(states, 0, 1)
    clear_state(states, 0)
    assert (states.conv[1] == 1.0).all()
    assert (states.recurrent[1] == 2.0).all()
    assert not np.any(states.conv[0])
    assert not np.any(states.recurrent[0])


def test_too_much_address_space_is_a_typed_error():
    """The error names a setting that helps."""
    with pytest.raises(ConfigError, match="--max-requests"):
        StatePool(1 << 50, {LayerIndex(0): SHAPE})
