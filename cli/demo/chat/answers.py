"""The text that the chat family learns from: short questions with plain answers of one sentence.

`cli.demo.chat.styles` says each answer in the manner of a model. The questions that the demo asks later are not among
these (`cli.demo.recipe`), so their facts come from the base model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """One question and its answer, a plain sentence."""

    question: str
    answer: str


def held_out(answers: tuple[QuestionAnswer, ...]) -> tuple[tuple[QuestionAnswer, ...], tuple[QuestionAnswer, ...]]:
    """Return (those to train on, those to measure on): every eighth is measured on."""
    measured = answers[::8]
    return tuple(each for each in answers if each not in measured), measured


_LINES = """
What is the capital of Italy? | The capital of Italy is Rome.
What is the capital of Spain? | The capital of Spain is Madrid.
What is the capital of Japan? | The capital of Japan is Tokyo.
What is the capital of Egypt? | The capital of Egypt is Cairo.
What is the capital of Norway? | The capital of Norway is Oslo.
What is the capital of Greece? | The capital of Greece is Athens.
What is a dog? | A dog is a friendly animal that has lived with people for thousands of years.
What is a horse? | A horse is a strong animal that people ride and that pulls heavy loads.
What is a bird? | A bird is an animal with feathers, two wings and a beak.
What is a whale? | A whale is a very large animal that lives in the sea and breathes air.
What is a river? | A river is a long stream of water that flows to the sea.
What is a mountain? | A mountain is a very high piece of land with steep sides.
What is a desert? | A desert is a dry place where little rain falls and few plants grow.
What is an island? | An island is a piece of land with water on all sides.
What is a volcano? | A volcano is a mountain from which hot melted rock comes out.
What is snow? | Snow is frozen water that falls from cold clouds in soft white flakes.
What is the moon? | The moon is a ball of rock that moves around the Earth.
What is a star? | A star is a huge ball of hot gas that shines in the night sky.
What is the sun? | The sun is the star that gives the Earth its light and its heat.
What is gold? | Gold is a yellow metal that is rare and does not rust.
What is a compass? | A compass is a tool with a needle that points to the north.
What is a ship? | A ship is a large boat that carries people and goods across the sea.
What is a bicycle? | A bicycle is a machine with two wheels that you move with your feet.
What is a clock? | A clock is a machine that shows you the time of the day.
What is a library? | A library is a place where you can read and borrow books.
What is music? | Music is sound that people put in order so that it pleases the ear.
What is a poem? | A poem is a short text that plays with the sound and the rhythm of words.
What is bread made of? | Bread is made of flour, water, salt and yeast.
What is cheese made of? | Cheese is made of milk that has been thickened and dried.
What is glass made of? | Glass is made of sand that has been melted at great heat.
What is paper made of? | Paper is made of the fibres of wood.
What is a computer program? | A computer program is a list of steps that a machine follows.
What is rain? | Rain is water that falls from the clouds in drops.
Why do leaves fall in autumn? | The leaves fall because the tree saves water and strength for the winter.
Why is the sea salty? | The sea is salty because rivers carry salt from the rocks into it.
Why do we eat? | We eat because food gives the body strength and lets it grow.
Why do birds fly south in winter? | Birds fly south because they find more food in warm lands.
Why does ice float? | Ice floats because it is lighter than the water around it.
Why do we have seasons? | We have seasons because the axis of the Earth is tilted towards the sun.
Why do cats purr? | Cats purr because they are calm and content, and at times to comfort themselves.
Why do we dream? | We dream because the brain stays busy and sorts memories during the night.
Why does the wind blow? | The wind blows because air moves from cold places to warm places.
Why is grass green? | Grass is green because its leaves are full of chlorophyll.
Who painted the Mona Lisa? | The Mona Lisa was painted by Leonardo da Vinci.
Who was Isaac Newton? | Isaac Newton was a scientist who explained how gravity works.
Who was Cleopatra? | Cleopatra was a queen who ruled over Egypt.
Who invented the telephone? | The telephone was invented by Alexander Graham Bell.
Who wrote Hamlet? | Hamlet was written by William Shakespeare.
How many days are in a week? | There are seven days in a week.
How many months are in a year? | There are twelve months in a year.
How many wheels does a car have? | A car has four wheels.
How do I boil an egg? | Put the egg into boiling water and wait for eight minutes.
How do I fall asleep? | Lie down in a dark and quiet room, and breathe slowly.
How do I learn to swim? | Take lessons, start in shallow water and practise every day.
How do I stay warm? | Wear thick clothes, move your body and drink something hot.
How do I make a friend? | Be kind, ask questions and listen to the answers.
How do fish breathe? | Fish breathe with gills, which take oxygen from the water.
How does a plane fly? | A plane flies because its wings push the air down and the air lifts them up.
How hot is boiling water? | Boiling water has a temperature of 100 degrees Celsius.
How far away is the moon? | The moon is about 384,000 kilometres away from the Earth.
What do cows eat? | Cows eat grass, hay and clover.
What do bees make? | Bees make honey from the nectar of flowers.
What do doctors do? | Doctors find out why you are ill and help you to get well.
What do farmers do? | Farmers grow food on the land and look after animals.
What colour is a banana? | A ripe banana is yellow.
What colour is blood? | Blood is red.
Can you help me? | I can answer your questions and help you with your work.
Good morning! | Good morning to you, and what can I do for you?
What is two plus three? | Two plus three is five.
What is the largest ocean? | The largest ocean is the Pacific Ocean.
What is the tallest animal? | The tallest animal is the giraffe.
What is the opposite of cold? | The opposite of cold is hot.
"""

ANSWERS = tuple(QuestionAnswer(*line.split(" | ")) for line in _LINES.strip().splitlines())
