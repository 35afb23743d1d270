"""A CSV of clicks as a user might have it, whose labels follow a known rule."""

from __future__ import annotations

import csv
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

HEADER = (
    *("price", "distance_km", "age", "country", "device", "category", "user_id", "item_id"),
    *("tags", "timestamp", "click", "purchase"),
)
COUNTRIES = ("DE", "FR", "IT", "ES", "Zürich", "日本", "US", "BR")
DEVICES = ("phone", "tablet", "desktop")
TAGS = tuple(f"tag{number}" for number in range(40))


def rows(count: int, seed: int = 0) -> list[list[object]]:
    """``count`` rows in the order of time, with the columns of `HEADER`."""
    random = np.random.default_rng(seed)
    users, items = random.normal(0, 1, 500), random.normal(0, 1, 300)
    of_country = random.normal(0, 0.7, len(COUNTRIES))
    of_tag = random.normal(0, 0.5, len(TAGS))
    begin = datetime(2024, 1, 1, tzinfo=timezone.utc)
    made: list[list[object]] = []
    for number in range(count):
        price = float(random.lognormal(3, 1))
        distance = float(random.exponential(20))
        age = float(random.integers(18, 80))
        country, device = random.integers(len(COUNTRIES)), random.integers(len(DEVICES))
        user, item = random.integers(len(users)), random.integers(len(items))
        tags = random.integers(len(TAGS), size=random.integers(0, 5))
        score = users[user] + items[item] + of_country[country] + of_tag[tags].sum()
        score += 0.5 * device - 0.3 * np.log(price) - 0.02 * distance
        click = int(random.random() < 1 / (1 + np.exp(-score)))
        purchase = int(click and random.random() < 0.3)
        moment = begin + timedelta(seconds=60 * number)
        made.append(
            [
                f"{price:.2f}" if random.random() > 0.05 else "",
                f"{distance:.3f}",
                f"{age:.1f}",
                COUNTRIES[country],
                DEVICES[device] if random.random() > 0.03 else "",
                f"cat{items[item]:.0f}",
                f"u{user}",
                f"i{item}",
                "|".join(TAGS[tag] for tag in tags),
                moment.strftime("%Y-%m-%d %H:%M:%S"),
                click,
                purchase,
            ]
        )
    return made


def write_csv(path: Path, content: list[list[object]], delimiter: str = ",") -> None:
    """Write rows under the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(content)
