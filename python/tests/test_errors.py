"""Every wrong call raises the typed error that names operator, argument and rule, and the next call is right."""

import pickle

import pytest
import torch
from contract import OPERATORS, every_sample

import annulus
from annulus.errors import typed

BAD = [(name, *bad) for name, module in OPERATORS.items() for bad in module.BAD]


def assert_next_call_is_right(sample):
    assert all(torch.isfinite(y).all() for y in sample.run(sample.make("cpu")))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("operator,call,message", BAD, ids=[f"{name}-{message[:60]}" for name, _, message in BAD])
def test_bad_call(operator, call, message, grad):
    with torch.set_grad_enabled(grad), pytest.raises(annulus.InvalidArgument, match=message):
        call(grad)
    assert_next_call_is_right(OPERATORS[operator].SAMPLES[0])


WRONG = {
    "a rank too many": lambda t: t[None] if t.dim() != 1 else t[None, None],  # a vector may stand for one row
    "a rank that no tensor has": lambda t: t[(None,) * (7 - t.dim())],
    "a dtype that is not known": lambda t: t.to(torch.int8),
    "a dtype of another kind": lambda t: t.to(torch.int32 if t.is_floating_point() else torch.float32),
    "another device": lambda t: t.to("meta"),
    "no tensor": lambda t: [1.0],
    "none": lambda t: None,
    "sparse": lambda t: t.to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
@every_sample
def test_wrong_tensor(sample, wrong, grad):
    """Each tensor in turn; where another one is what no longer fits, the message may name that one."""
    tensors = sample.make("cpu", grad=grad)
    if wrong == "another device" and len(tensors) == 1:
        pytest.skip("there is no other tensor that is elsewhere")
    if wrong in ("sparse", "quantized", "nested") and sample.what == "in place":
        pytest.skip("the sample computes with what it is given")
    required = {a.name for a in getattr(torch.ops.annulus, sample.op).default._schema.arguments if str(a.type) == "Tensor"}
    for name, tensor in tensors.items():
        if wrong == "none" and name not in required or wrong in ("sparse", "nested") and tensor.dim() == 0:
            continue
        first = name == next(iter(tensors))
        what = r"\w+" if first or wrong == "a rank too many" else name
        with pytest.raises(annulus.InvalidArgument, match=rf"\[{sample.op}\] {what} must "):
            sample.run(tensors, **{name: WRONG[wrong](tensor.detach())})
    assert_next_call_is_right(sample)


@pytest.mark.parametrize(
    "wrong,fullgraph", [("a rank too many", False), ("a rank too many", True), ("a dtype that is not known", True)]
)
@every_sample
def test_wrong_tensor_in_compiled_code(sample, wrong, fullgraph, device):
    """Noticed when it is traced, or when it runs."""
    tensors = sample.make(device)
    first, value = next(iter(tensors.items()))
    compiled = torch.compile(sample.run, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(annulus.InvalidArgument, match=rf"\[{sample.op}\] \w+ must ") as raised:
        compiled({**tensors, first: WRONG[wrong](value)})
    assert type(pickle.loads(pickle.dumps(raised.value))) is annulus.InvalidArgument


def test_types_and_their_families():
    assert issubclass(annulus.InvalidArgument, ValueError)
    assert issubclass(annulus.NotSupported, NotImplementedError)
    assert issubclass(annulus.DeviceError, RuntimeError) and issubclass(annulus.RankLost, RuntimeError)


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


@every_sample
def test_cuda_without_cuda_is_not_supported(sample):
    cuda = sample.info["cuda"]
    if cuda["available"] or not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA beside an annulus without")
    with pytest.raises(annulus.NotSupported, match="CUDA"):
        sample.run(sample.make("cuda"))
