"""`poprun --executable-cache-path`: every instance compiles, and the first one leaves the file."""

import sys

# A vision transformer in small: patches, a class token, attention, dropout; as the original's example is run.
VISION_TRANSFORMER = """
import popdist, popdist.poptorch, poptorch, torch

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 8, kernel_size=4, stride=4)
        self.token = torch.nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = torch.nn.Parameter(torch.randn(1, 5, 8))
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        scores = self.head(self.encoder(x)[:, 0])
        return scores, torch.nn.functional.cross_entropy(scores, labels)

popdist.init()
torch.manual_seed(0)
options = popdist.poptorch.Options().randomSeed(0)
options.Training.gradientAccumulation(2)
model = Classifier()
poptorch.BeginBlock(model.encoder, "encoder", ipu_id=0)
poptorch.BeginBlock(model.head, "head", ipu_id=1)
options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement).orSharded())
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
trainer = poptorch.trainingModel(model, options, optimizer)
rows = 2 * 2 * options.replication_factor
for _ in range(2):
    trainer(torch.randn(rows, 3, 8, 8), torch.randint(3, (rows,)))
print("trained")
"""


def test_a_vision_transformer_trains_with_an_empty_folder_and_then_with_what_is_in_it(poprun, tmp_path):
    program, folder = tmp_path / "vit.py", tmp_path / "executables"
    program.write_text(VISION_TRANSFORMER)
    words = (
        "--num-replicas=4",
        "--num-instances=2",
        "--ipus-per-replica=2",
        f"--executable-cache-path={folder}",
    )
    for _ in range(2):
        run = poprun(*words, sys.executable, program)
        assert run.wait() == 0, run.said()
        assert run.out.read_text() == "trained\n" * 2
        assert len(list(folder.iterdir())) == 1
