"""Train with options and loaders of one's own: 8 replicas, and many weight updates in a call."""

import lightning.pytorch as pl
from images import arguments, datasets, iterations
from lightning.pytorch.strategies import IPUStrategy  # pyright: ignore[reportAttributeAccessIssue]
from simple_lightning_ipu import SimpleLightning, report, trainer
from torch.utils.data import TensorDataset

import poptorch

BATCH = 16


def loader(options: poptorch.Options, data: TensorDataset, **more) -> poptorch.DataLoader:
    """A process of its own prepares the next call while one runs."""
    return poptorch.DataLoader(options, data, BATCH, mode=poptorch.DataLoaderMode.Async, **more)


def main() -> None:
    parser = arguments(__doc__, epochs=1)
    parser.add_argument("--device-iterations", type=int, default=300, help="weight updates in a call")
    parser.add_argument("--replicas", type=int, default=8)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    train, test = datasets(args.data_dir)

    training = poptorch.Options().replicationFactor(args.replicas)
    training.deviceIterations(iterations(args.device_iterations, train, args.replicas * BATCH))
    inference = poptorch.Options().deviceIterations(iterations(250, test, BATCH))

    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    train_loader, test_loader = loader(training, train, shuffle=True), loader(inference, test)
    run = trainer(args.epochs, strategy=strategy, log_every_n_steps=1)
    run.fit(SimpleLightning(), train_loader, test_loader)
    print(
        f"A call of training took {train_loader.combinedBatchSize} images, and there were {run.global_step}"
    )
    report(run)
    train_loader.terminate()
    test_loader.terminate()


if __name__ == "__main__":
    main()
