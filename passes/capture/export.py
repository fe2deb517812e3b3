"""Captures an unmodified model as a plain functional graph: ``torch.export``'s training IR, normalised.

Nothing is executed: all values are fake, and the model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from costmodel.errors import AutotpError
from passes.capture import attributes, checks
from passes.capture.attributes import Left, placed
from passes.capture.autograd_functions import Lost, kept_whole
from passes.capture.builder import CaptureError
from passes.capture.canonical import drop_checks, normalise
from passes.capture.canonical_views import reads_memory
from passes.capture.checkpoints import marked
from passes.capture.functional import Written
from passes.capture.masks import recognise_masks
from passes.capture.observed import Moment, Place, apart, copied, leaving, matching, numbered, observing, renewed
from passes.capture.precision import Precision, cast_parameters, check_dtypes, policy_of, precision_name, under
from passes.capture.regions import inline_regions
from passes.capture.signature import CallSignature, example, in_call_order, refusal
from passes.capture.view_writes import draws_as_laid, lay_as_computed, note_unmoved
from passes.capture.writes import functionalise
from passes.graph import TRACING, Cast, annotate, graphs_of, made_of
from passes.torch_internals import detect_fake_mode, set_aside, transforming, without_values

__all__ = ["CallSignature", "CaptureError", "Captured", "capture"]


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as a graph of out-of-place operators.

    Args:
        graph_module: placeholders (parameters, buffers, constants, inputs), then ``call_function`` nodes,
            then a tuple of the user's output leaves and the new values of placeholders that are changed in place. Every
            node's ``meta`` has ``val`` (its fake value); its `passes.graph.Note` has ``module`` (dotted path of the module
            it came from) and ``source`` (``file.py:LINE`` or None).
        parameters: placeholder name -> the parameter's name; a tied parameter has one placeholder.
        aliases: every other name of a tied parameter or buffer -> its first name in ``model.named_parameters()``.
        unused: names of parameters that no node uses; they get no gradient.
        buffers: placeholder name -> the buffer's name.
        caches: placeholders of non-persistent buffers that the graph writes, which may rest sharded.
        constants: placeholder name -> a tensor written out in the model's code or held as an attribute.
        inputs: placeholder names in the order of the tensors of ``signature.flatten``.
        outputs: number of the user's output leaves; non-tensor leaves are constants among the outputs.
        returned: number of the user's output leaves and the tensors of observed modules, which follow them.
        mutations: placeholder that is changed in place (buffer, parameter, input) -> name of the node with its new value;
            in the order of these nodes among the outputs, which follow the returned ones.
        written: further properties of these changes.
        signature: how the model is called.
        observed: when hooks of observed modules run, in order.
        precision: the precision of the capture, as `passes.capture.precision.precision_name` writes it. Placeholders of
            parameters have the dtypes in which they are used; their notes have those at rest (`passes.graph.Cast`).
        left: attributes that the forward pass sets; their tensors are the last ones among the ``outputs``.
        changed: attributes that the forward pass sets or changes in Python and the graph does not.
        attributes: paths of plain attributes whose tensors the model changes from call to call; buffers of the graph, too.
        reads: paths of plain attributes whose tensors are constants of the graph.
        flows: number of an output -> those of the outputs that the model computes from it (see `passes.graph.made_of`),
            including those for which the graph lacks the operators between, such as a copy.
    """

    graph_module: fx.GraphModule
    parameters: Mapping[str, str]
    aliases: Mapping[str, str]
    unused: tuple[str, ...]
    buffers: Mapping[str, str]
    caches: frozenset[str]
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: int
    returned: int
    mutations: Mapping[str, str]
    written: Written
    signature: CallSignature
    observed: tuple[Moment, ...] = ()
    precision: str | None = None
    left: tuple[Left, ...] = ()
    changed: tuple[Left, ...] = ()
    attributes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    flows: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def placeholders(self) -> dict[str, Tensor]:
        """Placeholder name -> its fake value, in the graph's order."""
        return {node.name: node.meta["val"] for node in self.graph_module.graph.find_nodes(op="placeholder")}

    @property
    def answered(self) -> tuple[Any, ...]:
        """How calls interpret the graph's outputs: the output tree, the observed moments and the attributes to set."""
        return self.signature.out_spec, self.observed, self.left

    def said(self, number: int) -> str:
        """A description of an output of the graph, for messages."""
        shown = [moment.module for moment in self.observed if Place(number) in moment.leaves]
        return f"output {number}" if number < self.outputs else f"what module {shown[0]!r} is given or returns"

    def answer(self, modules: Sequence[nn.Module], outputs: Sequence[Any]) -> Any:
        """The result of a call, from the graph's outputs; also sets the attributes in ``left`` on the modules.

        Args:
            modules: the modules of the model or its stand-in, in the order of ``model.modules()``.
            outputs: the graph's outputs.
        """
        found = self.signature.unflatten(outputs[: self.outputs])
        if not self.left:
            return found
        made, values = found
        for left, value in zip(self.left, values, strict=True):
            modules[left.index].__dict__[left.name] = value
        return made

    def title(self, name: str) -> str:
        """A description of a placeholder, for messages."""
        kind = "parameter" if name in self.parameters else "buffer" if name in self.buffers else "input"
        return f"{kind} {({**self.parameters, **self.buffers}).get(name, name)}"

    def values(self, state: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Placeholder name -> its value in a call: a parameter or buffer of ``state``, a constant, or an argument."""
        held = {name: state[fqn] for name, fqn in {**self.parameters, **self.buffers}.items()}
        given = zip(self.inputs, self.signature.flatten(tuple(args), dict(kwargs)), strict=True)
        return {**held, **self.constants, **dict(given)}


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    precision: Precision = None,
    outputs: str = "whole",
    observe: Sequence[str] = (),
) -> Captured:
    """Captures a model's forward pass for the shapes of an example call.

    Args:
        model: any module that ``torch.export`` can trace, in training or evaluation mode, which the graph keeps.
        args: example positional arguments; a ``DTensor`` stands for a tensor of its global shape.
        kwargs: example keyword arguments; without any arguments, a Hugging Face model's ``dummy_inputs`` are used.
        precision: see `passes.capture.precision`; None leaves dtypes as they are.
        outputs: ``whole``, or ``dtensor``: the model's outputs may stay sharded. Every output is then an operator of its
            own, a view whose strategy determines the layout.
        observe: names of modules, or patterns of names; the graph returns the inputs and outputs of these modules too,
            which may stay sharded.

    Raises:
        AutotpError: a pattern matches no module's name, or the model and the precision contradict each other.
        CaptureError: the model cannot be exported, or does something that has no functional form.
        TypeError: the example arguments do not fit the model's ``forward``.
        ValueError: there are no example inputs, or the model's tied weights came apart on the meta device.
    """
    if detect_fake_mode(()) is not None or transforming():
        within = "a FakeTensorMode, in which it may be made, or a transform of torch.func"
        raise AutotpError(f"a model cannot be captured inside {within}: plan outside")
    with TRACING, set_aside():
        checks.require_plain(model, args, kwargs)
        how = *example(model, args, kwargs), precision, outputs, observe
        checks.check_tying(model)
        checks.refuse_hooks(model)
        if isinstance(found := _captured(model, *how), Captured):
            return found
        with attributes.buffered(model, found):
            made = _captured(model, *how)
    if isinstance(made, Captured):
        return replace(made, attributes=found)
    raise CaptureError(f"{type(model).__name__}: forward changes {', '.join(made)}; make them buffers")


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: Precision,
    outputs: str,
    observe: Sequence[str],
) -> Captured | tuple[str, ...]:
    """Captures a model; if plain attributes have to be buffers first, returns their paths instead."""
    checks.check_memory(model)
    policy = policy_of(precision)
    casts: Mapping[str, Cast] = {}
    if policy is None:
        program, moments, left, anew, seen = _export(model, args, kwargs, observe)
    else:
        casts = cast_parameters(model, policy)
        with under(model, policy, casts):
            program, moments, left, anew, seen = _export(model, args, kwargs, observe)
    out_spec = program.call_spec.out_spec.child(0) if observe else program.call_spec.out_spec
    exported = program.graph_module
    checks.refuse_sparse(model, exported)
    note_unmoved(seen.unmoved, graphs_of(exported))
    values = {n.name: n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder"}
    names = _Names(model, program, values, args, kwargs, seen.parameters.values())

    mode = detect_fake_mode([n.meta.get("val") for n in exported.graph.nodes])
    if mode is None:
        raise CaptureError(f"{type(model).__name__}: the graph has no tensors; there is nothing to plan")
    drop_checks(exported)
    graph = inline_regions(exported, mode, names.placeholders, names.renamed, names.constants, names.inputs)
    kinds = dict.fromkeys(names.parameters, "parameter") | dict.fromkeys((*names.buffers, *names.attributes), "buffer")
    note_unmoved(seen.unmoved, [graph])  # for its new placeholders
    graph, written = functionalise(graph, mode, kinds | dict.fromkeys(names.inputs, "input"))
    strided = written.strided or reads_memory(graph, names.inputs)
    written = replace(written, strided=strided, drawn=draws_as_laid(graph, names.inputs))
    places = written.places
    if needed := {*attributes.carried(model, anew), *(path for name, path in names.attributes.items() if name in places)}:
        return tuple(sorted(needed))
    results = out_spec.num_leaves
    shown = range(results, len(graph.output_node().args[0]) - len(places))  # type: ignore[arg-type]
    lay_as_computed(graph, mode)
    sources: Any = graph.output_node().args[0][:results]  # type: ignore[index]
    kept = results - out_spec.child(1).num_leaves if left else results
    flows = made_of([*sources[:kept], *(copied(leaf) for leaf in sources[kept:])])
    graph = normalise(graph, mode, places, shown)
    recognise_masks(graph)
    leaves: Any = graph.output_node().args[0]
    mutations = {buffer: leaves[place].name for buffer, place in places.items()}
    numbers = apart(graph, shown, kept=outputs == "dtensor")
    renewed_state = {{**names.parameters, **names.buffers}.get(name) for name in mutations}
    lost = [path for path in anew if names.aliases.get(path, path) not in renewed_state]
    lost += [path for path in attributes.of_other_kinds(model, args, kwargs, anew) if path not in lost]
    checks.refuse_seeds(model, graph, seen.seeded)
    checks.warn_of_changes(model, lost)
    checks.warn_of_gradients(model, [names.buffers[name] for name in written.carried])
    checks.refuse_copies(model, casts.keys() & renewed_state)
    check_dtypes(graph, policy)
    for node in graph.find_nodes(op="placeholder"):
        if names.parameters.get(node.name) in casts:
            annotate(node, cast=casts[names.parameters[node.name]])
    unused = [names.parameters[n.name] for n in graph.nodes if n.name in names.parameters and not n.users]
    signature = CallSignature.of(model.forward, args, kwargs, out_spec)
    return Captured(
        graph_module=fx.GraphModule(nn.Module(), graph, class_name=type(model).__name__),
        parameters=names.parameters,
        aliases=names.aliases,
        unused=tuple(unused),
        buffers=names.buffers,
        caches=frozenset(places).intersection(names.transient),
        constants=names.constants,
        inputs=tuple(names.inputs),
        outputs=results,
        returned=len(graph.output_node().args[0]) - len(places),  # type: ignore[arg-type]
        mutations=mutations,
        written=written,
        signature=signature,
        observed=numbered(moments, numbers),
        precision=precision_name(precision),
        left=left,
        changed=placed(model, lost),
        reads=tuple(names.attributes.values()),
        flows=flows,
    )


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observe: Sequence[str],
    left: tuple[Left, ...] = (),
) -> tuple[torch.export.ExportedProgram, list[Moment], tuple[Left, ...], dict[str, Any], checks.Seen]:
    """The exported program, the observed moments, the attributes that are set, other changes of state, and the records."""
    observed = matching(model, observe)
    try:
        with (
            without_values(), attributes.restored(model), torch.enable_grad(), marked() as regions,
            kept_whole(regions), leaving(model, left), attributes.in_place(model), observing(model, observed) as moments,
            checks.looking(model) as seen,
        ):  # fmt: skip
            exported = torch.export.export(model, args, kwargs, strict=False)
        known = {each.path for each in left}
        anew = {path: seen.after[path] for path in attributes.changed(seen.before, seen.after) if path not in known}
        if not left and (found := renewed(model, args, kwargs, anew)):
            return _export(model, args, kwargs, observe, found)
        return exported, moments, left, anew, seen
    except Lost as error:
        raise CaptureError(f"{type(model).__name__}: {error}") from error
    except (CaptureError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise refusal(model, args, kwargs, error) from error


class _Names:
    """Maps placeholders to parameters, buffers, constants and inputs; merges duplicates and drops constant arguments."""

    def __init__(
        self, model: nn.Module, program: torch.export.ExportedProgram, values: Mapping[str, Any],
        args: tuple[Any, ...], kwargs: dict[str, Any], foreign: Collection[nn.Parameter],
    ) -> None:  # fmt: skip
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.transient: set[str] = set()
        self.constants: dict[str, Tensor] = {}
        self.attributes: dict[str, str] = {}
        self.renamed: dict[str, Any] = {}
        every: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        every |= dict(model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        for fqn, tensor in every.items():
            first.setdefault(id(tensor), fqn)
        canonical = {fqn: first[id(tensor)] for fqn, tensor in every.items()}
        self.aliases = {fqn: name for fqn, name in canonical.items() if fqn != name}

        user: list[str | None] = []
        holders: dict[str, str] = {}
        for spec in program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind is InputKind.USER_INPUT:
                constant = not isinstance(values[name], Tensor)  # a member of an enumeration too
                values = {**values, _unreserved(name): values[name]}
                user.append(None if constant else _unreserved(name))
                self.renamed[name] = (values[name],) if constant else _unreserved(name)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                held = self.parameters if spec.kind is InputKind.PARAMETER else self.buffers
                fqn = canonical[spec.target]
                if holders.setdefault(fqn, name) == name:
                    held[name] = fqn
                    if spec.persistent is False and values[name].dim():
                        self.transient.add(name)
                self.renamed[name] = holders[fqn]
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                data = program.constants[spec.target]
                values[name].constant = None  # a fake tensor of one element would compute with it, in place too
                same = [each for each in foreign if each.is_meta == data.is_meta is False and data.is_set_to(each)]
                self.constants[name] = same[0] if same else data
                if attributes.plain(model, spec.target) is not None:
                    self.attributes[name] = spec.target
                self.renamed[name] = name
            else:
                raise CaptureError(
                    f"{type(model).__name__}: its graph takes '{name}', a {spec.kind.name.lower()}; only tensors can be "
                    "planned. A torch.Generator has no place in a graph: draw without one, or pass what it draws"
                )
        self.inputs = in_call_order(model, user, args, kwargs)
        order = [*self.parameters, *self.buffers, *self.constants, *self.inputs]
        self.placeholders = {name: values[name] for name in order}


def _unreserved(name: str) -> str:
    """An argument's name that fx does not change: it renames nodes called ``input`` or ``device`` in generated code."""
    return name if fx.Graph().placeholder(name).name == name else f"{name}_"
