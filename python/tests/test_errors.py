"""Every wrong call raises the typed error that names operator, argument and rule, and the next call is right."""

import pickle

import pytest
import torch

import annulus
from annulus.errors import typed

X = dict(size=(2, 3, 10, 8), theta=(3, 8))


def call(function=annulus.lrpe_cosine, size=X["size"], theta=X["theta"], shape=(10,), dtype=torch.float32,
         theta_dtype=torch.float32, **options):
    return function(torch.ones(size, dtype=dtype), torch.ones(theta, dtype=theta_dtype), shape, **options)


BAD = [
    (dict(size=(3, 10, 8)), r"\[lrpe_cosine\] x must have 4 dimensions but has shape \(3, 10, 8\)"),
    (dict(size=(1, 2, 3, 10, 8)), r"x must have 4 dimensions"),
    (dict(size=(1,) * 7), r"x must have at most 6 dimensions"),
    (dict(theta=(3,)), r"theta must have 2 dimensions"),
    (dict(theta=(2, 8)), r"theta must have 3 rows"),
    (dict(theta=(3, 7)), r"theta must have at least"),
    (dict(theta=(3, 16), size=(2, 3, 12, 8), shape=(3, 4)), r"theta must leave a column to every axis"),
    (dict(dtype=torch.int32), r"x must be one of f64, f32, f16, bf16 but is i32"),
    (dict(dtype=torch.int8), r"x must have a dtype that annulus knows"),
    (dict(dtype=torch.complex64), r"x must have a dtype"),
    (dict(theta_dtype=torch.float64), r"theta must be f32 but is f64"),
    (dict(dtype=torch.bfloat16, theta_dtype=torch.float16), r"theta must be one of f32, bf16 but is f16"),
    (dict(shape=(11,)), r"shape must have prefix \+ product = 10"),
    (dict(shape=()), r"shape must have 1 to 4 axes but has 0"),
    (dict(shape=(1, 1, 1, 1, 10)), r"shape must have 1 to 4 axes but has 5"),
    (dict(shape=(-10,)), r"shape must have no negative size"),
    (dict(shape=10), r"shape must be a tuple of 1 to 4 integers, unless position_ids is given, but is 10"),
    (dict(shape=(10.0,)), r"shape must be"),
    (dict(prefix=-1, shape=(11,)), r"prefix must be at least 0 but is -1"),
    (dict(prefix=1.5), r"prefix must be int but is float 1.5"),
    (dict(activation="tanh"), r"activation must be none, relu, sigmoid, silu or softmax but is 'tanh'"),
    (dict(activation=None), r"activation must be str"),
    (dict(softmax_dim=1), r"softmax_dim must be -1 \(features\) or -2 \(tokens\) but is 1"),
    (dict(offset=2**63 - 1), r"offset must lie within"),
    (dict(offset=2**80), r"offset must be int"),
    (dict(offset=0.5), r"offset must be int"),
    (dict(offset=1, shape=(2, 5), theta=(3, 4)), r"offset must be 0 for a shape of several axes"),
    (dict(offset=torch.zeros(3, dtype=torch.int64)), r"offset must have shape \(2,\)"),
    (dict(offset=torch.zeros(2)), r"offset must be one of i32, i64 but is f32"),
    (dict(offset=torch.zeros(2, 1, dtype=torch.int64)), r"offset must have 1 dimension"),
    (dict(offset=torch.zeros(2, dtype=torch.int64), shape=(2, 5), theta=(3, 4)), r"offset must be left out"),
    (dict(shape=None), r"shape must be a tuple of 1 to 4 integers, unless position_ids is given, but is None"),
    (dict(position_ids=torch.zeros(10, dtype=torch.int64)), r"shape must be left out where position_ids is given"),
    (dict(shape=None, position_ids=list(range(10))), r"position_ids must be a tensor but is list"),
    (dict(shape=None, position_ids=torch.zeros(())), r"position_ids must have 1 to 3 dimensions but has 0"),
    (dict(shape=None, position_ids=torch.zeros(10)), r"position_ids must be one of i32, i64 but is f32"),
    (dict(shape=None, position_ids=torch.zeros(3, 10, dtype=torch.int32)),
     r"position_ids must have shape \(2 or 1, 10, 1 to 4\) but has \(3, 10, 1\)"),
    (dict(shape=None, position_ids=torch.zeros(1, 10, 2, dtype=torch.int32)),
     r"axis 2 of position_ids is encoded nowhere"),
    (dict(shape=(2**62, 4)), r"\[lrpe_cosine\] shape must have a product below 2\^63 but is \(4611686018427387904, 4\)"),
    (dict(function=annulus.lrpe_rotate, size=(2, 3, 10, 7)), r"\[lrpe_rotate\] x must have an even number of columns"),
    (dict(function=annulus.lrpe_rotate, theta=(3, 3)), r"\[lrpe_rotate\] theta must have at least"),
    (dict(function=annulus.lrpe_rotate_, size=(2, 3, 10, 7)), r"\[lrpe_rotate\] x must have an even number"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("arguments,message", BAD)
def test_bad_call(arguments, message, grad):
    with torch.set_grad_enabled(grad), pytest.raises(annulus.InvalidArgument, match=message):
        call(**arguments)
    assert torch.isfinite(call()).all()  # a bad call leaves nothing behind


def test_bad_pairs_and_devices():
    q, theta = torch.ones(2, 4, 10, 8), torch.ones(3, 8)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_cosine_qk\] k must"):
        annulus.lrpe_cosine_qk(q, torch.ones(2, 3, 10, 8), theta, (10,))
    with pytest.raises(annulus.InvalidArgument, match=r"k must have shape \(2, 2, 10, 8\)"):
        annulus.lrpe_cosine_qk(q, torch.ones(2, 2, 9, 8), theta[:2], (10,))
    with pytest.raises(annulus.InvalidArgument, match="theta must be on the device of x"):
        annulus.lrpe_cosine(torch.ones(X["size"]), torch.ones(X["theta"], device="meta"), (10,))
    for name in ("offset", "position_ids"):  # torch would take the call for one without data, and return garbage
        for function in (annulus.lrpe_cosine, annulus.lrpe_rotate, annulus.lrpe_rotate_):
            x, positions = torch.ones(2, 3, 10, 8), torch.zeros(2, dtype=torch.int64, device="meta")
            with pytest.raises(annulus.InvalidArgument, match=f"{name} must be on the device of x, cpu, but is on meta"):
                function(x, theta, (10,) if name == "offset" else None, **{name: positions})
            assert torch.equal(x, torch.ones_like(x))
    with pytest.raises(annulus.InvalidArgument, match=r"x must be Tensor but is ndarray|x must be Tensor"):
        annulus.lrpe_cosine([1.0], theta, (10,))
    with pytest.raises(annulus.InvalidArgument, match="x must be a tensor but is None"):
        annulus.lrpe_cosine(None, theta, (10,))
    with pytest.raises(annulus.InvalidArgument, match="x must have a dtype that annulus knows .* but has int16"):
        annulus.lrpe_cosine(torch.ones(X["size"], dtype=torch.int16), theta, (10,))


def test_bad_packed_positions():
    for cu_seqlens, came in (
        ([0, 3], "list"),
        (torch.tensor([0.0, 3.0]), "torch.float32"),
        (torch.tensor([0, 3], dtype=torch.uint8), "torch.uint8"),
    ):
        with pytest.raises(annulus.InvalidArgument, match=rf"cu_seqlens must be a tensor of int32 or int64 but is {came}"):
            annulus.packed_positions(cu_seqlens, 3)
    for size in ((0,), (1, 2), ()):
        with pytest.raises(annulus.InvalidArgument, match=r"cu_seqlens must have shape \(sequences \+ 1,\)"):
            annulus.packed_positions(torch.zeros(size, dtype=torch.int64), 3)


def test_in_place_needs_distinct_elements():
    x = torch.ones(1, 3, 10, 8).expand(2, 3, 10, 8)
    with pytest.raises(annulus.InvalidArgument, match=r"\[lrpe_rotate\] y must"):
        annulus.lrpe_rotate_(x, torch.ones(3, 4), (10,))
    assert (x == 1).all()


def test_types_and_their_families():
    assert issubclass(annulus.InvalidArgument, ValueError)
    assert issubclass(annulus.NotSupported, NotImplementedError)
    assert issubclass(annulus.DeviceError, RuntimeError) and issubclass(annulus.RankLost, RuntimeError)
    with pytest.raises(ValueError):
        call(shape=(11,))


def test_messages_of_the_library_get_their_type_back():
    plain = typed(RuntimeError("annulus.DeviceError: [op] no memory\nException raised from f at g.cpp:1"))
    assert type(plain) is annulus.DeviceError and str(plain) == "[op] no memory"
    assert type(typed(RuntimeError("annulus.NotSupported: [op] no CUDA"))) is annulus.NotSupported
    lost = typed(RuntimeError("annulus.RankLost: rank=3 hop=2 direction=receive waited_s=1.500000: [ring] rank 3 is gone"))
    assert type(lost) is annulus.RankLost and str(lost) == "[ring] rank 3 is gone"
    assert (lost.rank, lost.hop, lost.direction, lost.waited_s) == (3, 2, "receive", 1.5)
    again = pickle.loads(pickle.dumps(lost))
    assert (str(again), again.rank, again.waited_s) == (str(lost), 3, 1.5)
    other = RuntimeError("something else")
    assert typed(other) is other


def test_cuda_without_cuda_is_not_supported():
    cuda = annulus.info()["operators"]["lrpe_cosine"]["cuda"]
    if cuda["available"] or not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA beside an annulus without")
    with pytest.raises(annulus.NotSupported, match="CUDA"):
        annulus.lrpe_cosine(torch.ones(X["size"], device="cuda"), torch.ones(X["theta"], device="cuda"), (10,))
