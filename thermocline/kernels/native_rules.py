"""The parameters of recurrent mixers as the compiled core knows them, each handed over once. Knows no state and no token."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from thermocline.kernels.native import load_native
from thermocline.kernels.recurrent_contract import MambaRule, SelectiveRule, ShortConvRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels import _native
    from thermocline.kernels.delta_contract import DeltaRule

_Rule = TypeVar("_Rule")
_Made = TypeVar("_Made")


class NativeRules:
    """By id of the rule, which is kept so that its id stays unique."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, object]] = {}

    def recurrent(
        self, rule: ShortConvRule | MambaRule | SelectiveRule
    ) -> _native.ShortConvRule | _native.MambaRule | _native.SelectiveRule:
        """Return a rule of whatever kind."""
        match rule:
            case ShortConvRule():
                return self.short_conv(rule)
            case MambaRule():
                return self.mamba(rule)
            case SelectiveRule():
                return self.selective(rule)

    def short_conv(self, rule: ShortConvRule) -> _native.ShortConvRule:
        """Return a short convolution."""
        return self._once(rule, _short_conv)

    def mamba(self, rule: MambaRule) -> _native.MambaRule:
        """Return Mamba2."""
        return self._once(rule, _mamba)

    def selective(self, rule: SelectiveRule) -> _native.SelectiveRule:
        """Return the first Mamba."""
        return self._once(rule, _selective)

    def delta(self, rule: DeltaRule) -> _native.DeltaRule:
        """Return a gated delta rule."""
        return self._once(rule, _delta)

    def _once(self, rule: _Rule, make: Callable[[_Rule], _Made]) -> _Made:
        """Return what was made of a rule; the first time it is made."""
        known = self._known.get(id(rule))
        if known is None:
            known = self._known[id(rule)] = (rule, make(rule))
        return cast("_Made", known[1])


def _short_conv(rule: ShortConvRule) -> _native.ShortConvRule:
    native: _native.ShortConvRule = load_native().ShortConvRule(rule.conv)
    return native


def _mamba(rule: MambaRule) -> _native.MambaRule:
    shape = rule.shape
    native: _native.MambaRule = load_native().MambaRule(
        heads=shape.heads,
        head_dim=shape.head_dim,
        groups=shape.groups,
        state_dim=shape.state_dim,
        conv=rule.conv,
        conv_bias=rule.conv_bias,
        step_bias=rule.step_bias,
        decay=rule.decay,
        skip=rule.skip,
        gain=rule.gain,
        epsilon=rule.epsilon,
    )
    return native


def _selective(rule: SelectiveRule) -> _native.SelectiveRule:
    native: _native.SelectiveRule = load_native().SelectiveRule(
        conv=rule.conv,
        conv_bias=rule.conv_bias,
        step_bias=rule.step_bias,
        decay=rule.decay,
        skip=rule.skip,
    )
    return native


def _delta(rule: DeltaRule) -> _native.DeltaRule:
    shape = rule.shape
    native: _native.DeltaRule = load_native().DeltaRule(
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        tiled=shape.tiled,
        by_channel=shape.by_channel,
        conv=rule.conv,
        step_bias=rule.step_bias,
        decay=rule.decay,
        gain=rule.gain,
        epsilon=rule.epsilon,
        sigmoid_gate=rule.sigmoid_gate,
        lower_bound=shape.lower_bound,
    )
    return native
