"""Which models a list of files is, and which of them a name means."""

from __future__ import annotations

import pytest

from thermocline.errors import HubError
from thermocline.hub.variants import (
    MAX_FILE_BYTES,
    RepoFile,
    checked_file,
    choose,
    group_variants,
)


def variants_of(*paths):
    """Variants of files of 1, 2, ... bytes."""
    return group_variants(RepoFile(path, size) for size, path in enumerate(paths, 1))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("OLMoE-1B-7B.i1-IQ2_XXS.gguf", "IQ2_XXS"),
        ("model.q8_0.gguf", "Q8_0"),
        ("bf16/model-00001-of-00001.gguf", "BF16"),
        ("Q6_K/anything.gguf", "Q6_K"),
        ("F16-Q4_0.GGUF", "Q4_0"),
        ("Q4_K_M.gguf", "Q4_K_M"),
        ("tiny-TQ1_0.gguf", "TQ1_0"),
        ("Qwen2.5-7B.gguf", ""),
    ],
)
def test_labels(path, label):
    """The last type that the name has, else the folder's; a name without one has no label."""
    (variant,) = variants_of(path)
    assert variant.label == label
    assert variant.selector == (label or path)


def test_parts_are_one_model_in_order():
    """Parts of a split model are one variant, wherever they stand in the list; missing ones are counted."""
    lacking, whole = variants_of(
        "m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf", "m-F16-00003-of-00003.gguf"
    )
    assert (whole.label, whole.nbytes, lacking.num_missing) == ("Q8_0", 3, 2)
    assert [file.path[7:12] for file in whole.files] == ["00001", "00002"]
    with pytest.raises(HubError, match="2 parts of F16 are missing"):
        choose("a/b", (whole, lacking), "F16")


@pytest.mark.parametrize("name", ["m-00000-of-00000.gguf", "m-00007-of-00003.gguf"])
def test_parts_with_impossible_numbers(name):
    """They are no whole model."""
    (variant,) = variants_of(name)
    assert variant.num_missing >= 1


def test_what_is_no_model_is_left_out():
    """Other files, projectors of images, and statistics."""
    assert (
        variants_of("README.md", "mmproj-F16.gguf", "x/mmproj-m-Q8_0.gguf", "m.imatrix.gguf") == ()
    )


def test_what_a_name_means():
    """Any case; the author's mix only where the type itself is not there; a file by name or path."""
    variants = variants_of("m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-UD-Q2_K.gguf", "d/m-Q8_0.gguf")
    for quant, path in (
        ("", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("Q2_K", "m-UD-Q2_K.gguf"),
        ("m-q8_0.gguf", "d/m-Q8_0.gguf"),
        ("d/m-Q8_0.gguf", "d/m-Q8_0.gguf"),
    ):
        assert choose("a/b", variants, quant).files[0].path == path
    with pytest.raises(HubError, match=r"no Q3_K_M, but Q4_K_M \(1 B\), UD-Q4_K_M"):
        choose("a/b", variants, "Q3_K_M")


def test_the_only_model_needs_no_name():
    """Where there is one, it is meant; a type that it is not is still an error."""
    only = variants_of("gpt-oss-20b-mxfp4.gguf")
    assert choose("a/b", only, "") is only[0]
    with pytest.raises(HubError, match="no Q4_K_M, but MXFP4"):
        choose("a/b", only, "Q4_K_M")
    with pytest.raises(HubError, match="no GGUF file"):
        choose("a/b", (), "")


@pytest.mark.parametrize(
    ("path", "nbytes"),
    [
        ("../m.gguf", 1), ("a/../../m.gguf", 1), ("/m.gguf", 1), ("a//m.gguf", 1), ("a\\m.gguf", 1), ("./m.gguf", 1),
        ("m\n.gguf", 1), ("\x1b[2J.gguf", 1), ("\u202em.gguf", 1), ("x" * 256 + ".gguf", 1), ("a/" * 600 + "m.gguf", 1),
        ("m.gguf", -1), ("m.gguf", MAX_FILE_BYTES + 1), ("m.gguf", "5"), ("m.gguf", None), (None, 1), (7, 1),
    ],
)  # fmt: skip
def test_files_that_can_not_be(path, nbytes):
    """A path that leaves its folder or can not be shown, a size that no file has: the file is not there."""
    assert checked_file(path, nbytes) is None


def test_only_a_sha256_counts_as_one():
    """Anything else is as if none were known."""
    good = "0" * 64
    assert checked_file("m.gguf", 1, good) == RepoFile("m.gguf", 1, good)
    for other in (None, 5, "0" * 63, "../" + "0" * 61, good.replace("0", "G")):
        assert checked_file("m.gguf", 1, other) == RepoFile("m.gguf", 1, None)
