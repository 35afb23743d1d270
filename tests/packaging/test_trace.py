"""Tracing, again and again in one process."""

from torch.fx import _symbolic_trace as torchs

from tests.package_factory import make_package


def test_packaging_leaves_no_generated_code_behind(tmp_path):
    make_package(tmp_path, name="first")  # imports what is only imported for packaging
    before = set(torchs._wrapped_fns_to_patch)
    make_package(tmp_path, name="second")
    assert set(torchs._wrapped_fns_to_patch) == before
