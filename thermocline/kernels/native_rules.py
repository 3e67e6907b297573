"""The parameters of recurrent mixers as the compiled core knows them, each handed over once. Knows no state and no token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.native import load_native
from thermocline.kernels.recurrent_contract import MambaRule, SelectiveRule, ShortConvRule

if TYPE_CHECKING:
    from thermocline.kernels import _native
    from thermocline.kernels.delta_contract import DeltaRule


class NativeRules:
    """By id of the rule, which is kept so that its id stays unique."""

    def __init__(self) -> None:
        self._deltas: dict[int, tuple[DeltaRule, _native.DeltaRule]] = {}
        self._short_convs: dict[int, tuple[ShortConvRule, _native.ShortConvRule]] = {}
        self._mambas: dict[int, tuple[MambaRule, _native.MambaRule]] = {}
        self._selectives: dict[int, tuple[SelectiveRule, _native.SelectiveRule]] = {}

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
        known = self._short_convs.get(id(rule))
        if known is None:
            native: _native.ShortConvRule = load_native().ShortConvRule(rule.conv)
            known = self._short_convs[id(rule)] = (rule, native)
        return known[1]

    def mamba(self, rule: MambaRule) -> _native.MambaRule:
        """Return Mamba2."""
        known = self._mambas.get(id(rule))
        if known is None:
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
            known = self._mambas[id(rule)] = (rule, native)
        return known[1]

    def selective(self, rule: SelectiveRule) -> _native.SelectiveRule:
        """Return the first Mamba."""
        known = self._selectives.get(id(rule))
        if known is None:
            native: _native.SelectiveRule = load_native().SelectiveRule(
                conv=rule.conv,
                conv_bias=rule.conv_bias,
                step_bias=rule.step_bias,
                decay=rule.decay,
                skip=rule.skip,
            )
            known = self._selectives[id(rule)] = (rule, native)
        return known[1]

    def delta(self, rule: DeltaRule) -> _native.DeltaRule:
        """Return a gated delta rule."""
        known = self._deltas.get(id(rule))
        if known is None:
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
            known = self._deltas[id(rule)] = (rule, native)
        return known[1]
