"""Train a small network on handwritten digits, cut into four blocks on four ipus."""

import argparse
import time
from pathlib import Path

import torch
from mnist import NO_DIGIT, datasets, filled_up
from model import Network
from tqdm import tqdm

import poptorch

BLOCKS = ("conv1", "conv2", "hidden", "head")  # names of the model's parts; block n runs on ipu n


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=40, help="images in a micro-batch")
    parser.add_argument("--device-iterations", type=int, default=10, help="weight updates in a call")
    parser.add_argument(
        "--gradient-accumulation", type=int, default=10, help="micro-batches in a weight update"
    )
    parser.add_argument("--test-batch-size", type=int, default=8, help="images in a micro-batch of the test")
    parser.add_argument(
        "--inference-iterations", type=int, default=100, help="micro-batches in a call of the test"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--strategy", choices=("pipelined", "sharded"), default="pipelined")
    parser.add_argument(
        "--offload-optimiser", action="store_true", help="keep the optimizer's state on the host"
    )
    parser.add_argument("--profile", action="store_true", help="record who computed what and when")
    parser.add_argument("--profile-dir", type=Path, default=Path("report"), help="where the profile goes")
    parser.add_argument("--debug", action="store_true", help="log every pass of the compiler")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files, plain or .gz")
    return parser.parse_args()


def options(args) -> poptorch.Options:
    """What training and testing have in common: how the blocks are placed and take turns."""
    stages = [poptorch.Stage(block).ipu(ipu) for ipu, block in enumerate(BLOCKS)]
    strategies = {"pipelined": poptorch.PipelinedExecution, "sharded": poptorch.ShardedExecution}
    opts = poptorch.Options()
    opts.setExecutionStrategy(strategies[args.strategy](*stages))
    opts.memoryFormat("auto")  # of convolutions: channels_last, since images are pooled
    if args.profile:
        opts.enableProfiling(str(args.profile_dir))
    return opts


def training_options(args) -> poptorch.Options:
    opts = options(args)
    opts.deviceIterations(args.device_iterations)
    opts.Training.gradientAccumulation(args.gradient_accumulation)
    opts.outputMode(poptorch.OutputMode.All)  # the scores of every image, to show the accuracy
    if args.offload_optimiser:
        on_host = poptorch.TensorLocationSettings().useOnChipStorage(False)
        opts.TensorLocations.setOptimizerLocation(on_host)
    return opts


def mark_blocks(model: Network) -> None:
    """Open a block at each part; it stays open until the next, so the loss belongs to the last one."""
    for name in BLOCKS:
        poptorch.BeginBlock(model.get_submodule(name), name)


def train(args, model, digits):
    check_a_call_is_filled(args, digits)
    opts = training_options(args)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    training_model = poptorch.trainingModel(model, opts, optimizer)
    loader = poptorch.DataLoader(
        opts,
        digits,
        batch_size=args.batch_size,
        shuffle=True,
        mode=poptorch.DataLoaderMode.Async,
        # The digits are three large tensors: shared with the loading process, not copied to it.
        async_options={"sharing_strategy": poptorch.SharingStrategy.SharedMemory, "early_preload": True},
    )
    seen, seconds, first = 0, 0.0, True
    for epoch in range(1, args.epochs + 1):
        correct = total = 0
        bar = tqdm(loader, desc=f"Epoch {epoch}/{args.epochs}", unit="call")
        start = time.perf_counter()
        for images, labels in bar:
            scores, losses = training_model(images, labels)
            correct += int((scores.argmax(1) == labels).sum())
            total += len(labels)
            bar.set_postfix_str(f"loss {losses.mean():.4f}, accuracy {correct / total:.2%}")
            if first:
                bar.write(f"Time to the first step: {time.perf_counter() - start:.2f} s, with compilation")
                bar.write(f"Memory layout of convolutions: {training_model.memory_format}")
                start, first = time.perf_counter(), False
            else:
                seen += len(labels)
        seconds += time.perf_counter() - start
    loader.terminate()
    if seen:
        print(f"Training: {seen / seconds:.0f} images per second after the first step")
    training_model.detachFromDevice()


def test(args, model, digits):
    opts = options(args).deviceIterations(args.inference_iterations)
    inference_model = poptorch.inferenceModel(model, opts)
    batch = args.test_batch_size * args.inference_iterations
    loader = poptorch.DataLoader(opts, filled_up(digits, batch), batch_size=args.test_batch_size)
    correct = total = 0
    for images, labels in loader:
        scores = inference_model(images)
        correct += int((scores.argmax(1) == labels).sum())
        total += int((labels != NO_DIGIT).sum())
    inference_model.detachFromDevice()
    print(f"Accuracy on test set: {correct / total:.2%}")


def check_a_call_is_filled(args, digits):
    call = args.batch_size * args.gradient_accumulation * args.device_iterations
    if len(digits) < call:
        raise SystemExit(
            f"{len(digits)} digits don't fill one call of {call}: "
            "lower --batch-size, --gradient-accumulation or --device-iterations"
        )


def main():
    args = arguments()
    if args.debug:
        poptorch.setLogLevel("DEBUG")
    torch.manual_seed(0)  # the first weights, and the order of the digits
    model = Network()
    mark_blocks(model)
    train_digits, test_digits = datasets(args.data_dir)
    model.train()
    train(args, model, train_digits)
    model.eval()
    test(args, model, test_digits)
    if args.profile:
        print(f"Profiles: {args.profile_dir}; popvision {args.profile_dir} shows them")


if __name__ == "__main__":
    main()
