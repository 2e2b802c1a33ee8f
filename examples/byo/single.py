"""A small network on handwritten digits in one process, on a GPU where there is one: plain torch, no Ray."""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits

device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, labels = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
targets = torch.tensor(labels, device=device)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(
    device
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(int(sys.argv[1])):
    loss = torch.nn.functional.cross_entropy(net(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
