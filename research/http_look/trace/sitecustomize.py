"""Time stamps inside a vLLM server, without a change to it: found by Python in every process that has this folder first.

Wraps the functions below when their module is imported, and appends `[name, begin, end, detail]` (seconds of the monotonic
clock, which all processes of a machine share) to the file `LOOK_TRACE.PID`, a line for each call. While the file
`LOOK_PROFILE` exists torch's profiler runs around each load; what the GPU did, and which calls told it to, go there too.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time

OUT = os.environ.get("LOOK_TRACE", "")
WRAPPED = {
    "vllm.v1.engine.core": [
        "EngineCore.step", "EngineCore.step_with_batch_queue", "EngineCore.add_request",
        "EngineCore.preprocess_add_request",
    ],
    "vllm.v1.core.sched.scheduler": ["Scheduler.schedule", "Scheduler.update_from_output"],
    "vllm.v1.worker.gpu.model_runner": ["GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens"],
    "vllm.v1.worker.gpu_model_runner": ["GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens"],
    "vllm.v1.worker.gpu.async_utils": ["AsyncOutput.get_output"],
    "vllm.v1.worker.gpu.kv_connector": ["ActiveKVConnector.pre_forward", "ActiveKVConnector.post_forward"],
    "vllm.v1.engine.async_llm": ["AsyncLLM.generate!first", "AsyncLLM.add_request!async"],
    "vllm.v1.engine.output_processor": ["OutputProcessor.process_outputs"],
    "semblend.integration.vllm.scheduler.scheduler_connector": [
        "SchedulerConnector.note_arrival", "SchedulerConnector.count_matched", "SchedulerConnector.note_allocated",
        "SchedulerConnector.build_orders", "SchedulerConnector.note_report", "SchedulerConnector._catch_up",
        "SchedulerConnector.finish",
    ],
    "semblend.integration.vllm.connector_v1": ["SemBlendPromMetrics.observe"],
    "semblend.integration.vllm.worker.worker_connector": [
        "WorkerConnector.before_step", "WorkerConnector.load", "WorkerConnector.copy_out",
        "WorkerConnector._have_weights_changed",
    ],
    "semblend.materialize.blend.passes": [
        "PassRunner.compute!steps", "PassRunner.run_layers!steps", "PassRunner._wait_for_device",
    ],
}  # fmt: skip
_file, _lock = None, threading.Lock()


def note(name, begin, end, detail=None):
    global _file
    with _lock:
        if _file is None:
            _file = open(f"{OUT}.{os.getpid()}", "a", buffering=1 << 20)
        _file.write(json.dumps([name, begin, end, detail]) + "\n")


def flush():
    if _file is not None:
        with _lock:
            _file.flush()


def _flush_now_and_then():
    while True:
        time.sleep(0.5)
        flush()


def _detail(name, args, kept):
    if name.endswith(("count_matched", "note_allocated")):
        return getattr(args[1], "request_id", None)
    if name.endswith("compute") or name.endswith("run_layers"):
        return [args[2], len(args[3])]
    if name.endswith(".schedule"):
        return dict(kept.num_scheduled_tokens) if kept is not None else None
    if name.endswith("add_request"):
        return getattr(args[1], "request_id", str(args[1])) if len(args) > 1 else None
    return None


def wrap(function, name, how):
    if how == "steps":

        def steps(*args, **named):
            begin, inside = time.monotonic(), 0.0
            running = function(*args, **named)
            sent = None
            while True:
                started = time.monotonic()
                try:
                    given = running.send(sent)
                except StopIteration as end:
                    inside += time.monotonic() - started
                    note(name, begin, time.monotonic(), [_detail(name, args, None), inside])
                    return end.value
                inside += time.monotonic() - started
                sent = yield given

        return steps
    if how == "first":

        async def first(*args, **named):
            begin, told = time.monotonic(), False
            async for one in function(*args, **named):
                if not told:
                    note(name, begin, time.monotonic(), getattr(one, "request_id", None))
                    told = True
                yield one

        return first
    if how == "async":

        async def later(*args, **named):
            begin = time.monotonic()
            found = await function(*args, **named)
            note(name, begin, time.monotonic(), _detail(name, args, None))
            return found

        return later

    def plain(*args, **named):
        begin = time.monotonic()
        found = function(*args, **named)
        note(name, begin, time.monotonic(), _detail(name, args, found))
        return found

    return plain


def patch(module, names):
    for entry in names:
        path, _, how = entry.partition("!")
        owner, where = module, path.split(".")
        for part in where[:-1]:
            owner = getattr(owner, part, None)
        if owner is not None and where[-1] in getattr(owner, "__dict__", {}):
            setattr(owner, where[-1], wrap(owner.__dict__[where[-1]], path, how))
    if module.__name__ == "semblend.integration.vllm.worker.worker_connector" and os.environ.get("LOOK_PROFILE"):
        _profile_loads(module.WorkerConnector, os.environ["LOOK_PROFILE"])


def _profile_loads(half, path):
    """Profile the loads of a step while the file ``path`` exists."""
    load = half.load

    def profiled(self, orders):
        if not os.path.exists(path) or not (orders.loads or len(self._loads)):
            return load(self, orders)
        import torch

        name = [one.request_id for one in orders.loads]
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as seen:
            begin = time.monotonic()
            found = load(self, orders)
            torch.cuda.synchronize()
            end = time.monotonic()
        try:
            cuda = torch.autograd.DeviceType.CUDA
            events = [
                [e.name[:80], e.time_range.start, e.time_range.end, e.device_type == cuda]
                for e in seen.events()
                if e.device_type == cuda or e.name.startswith("cuda")
            ]
        except Exception as error:
            events = repr(error)
        note("profile", begin, end, [name, events])
        return found

    half.load = profiled


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in WRAPPED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def run(module):
            execute(module)
            try:
                patch(module, WRAPPED[fullname])
            except Exception as error:  # the server matters more
                print("trace:", fullname, error, file=sys.stderr)

        spec.loader.exec_module = run
        return spec


if OUT:
    sys.meta_path.insert(0, Finder())
    threading.Thread(target=_flush_now_and_then, daemon=True).start()
    import atexit

    atexit.register(flush)
