"""The default prompt: about a thousand tokens with SmolLM2's vocabulary."""

PROMPT = """\
Read the following pages from the logbook of a small observatory, and then do what is asked at the end.

The observatory of Marrow Hill stands above a fishing village on the north coast. It was never meant to be \
important. A retired harbour pilot named Osric Vane paid for the dome with the money from the sale of his \
boat, because he had spent forty years steering by the stars and wanted, as he put it, to look them in the \
face before he died. The telescope inside is a refractor with a lens no wider than a dinner plate. It was \
ground by a maker of spectacles in the next town, who had never made anything of the kind and who charged \
nothing but a seat at the eyepiece on the first clear night.

For the first ten years the logbook holds only the weather and the phases of the moon. Then, in the winter \
of the great frost, a schoolteacher called Imre Sand began to climb the hill every evening after lessons. \
He brought a box of wooden pegs and a board with six hundred holes, and each night he moved one peg. Every \
hole stood for a star near the constellation of the Lyre, and every peg for its brightness, judged by eye \
against its neighbours. The villagers thought it was a game. Children were allowed to move the pegs when \
they could say which of two stars was the brighter one, and in this way a whole generation learned to see \
small differences in faint lights.

In the fourth year of the board a girl of eleven, Petra Holm, said that one of the pegs was wrong. Imre \
Sand told her to look again the next night, and the night after that. She was right each time, but never \
in the same way: the star was brighter on one evening and fainter on the next. They wrote down every \
estimate, with the hour and the state of the sky, on the blank backs of old tide tables. After three \
months they had two hundred numbers and no explanation. After five months the rain came and there was \
nothing to do but to draw. Petra folded the long strip of paper so that the peaks lay on top of one \
another, and found that it folded evenly: the star brightened and faded every nine days and a few hours.

A letter went to the university. No answer came for a year. Then two astronomers arrived on the mail boat \
with a brass photometer in a crate of straw, and asked to see the instrument with which the discovery had \
been made. Osric Vane, who was by then nearly blind, led them to the board with the pegs. They were polite \
about it. They stayed for eleven nights and measured, on the two clear ones, what Petra had already \
written down.

The photometer stayed behind as a present. It was accurate and slow, and could measure only one star in \
the time that a child could judge twenty. So they did both: the photometer measured the same five stars \
every night, and the board compared all the others to those five. The logbook calls the five stars the \
anchors. When an anchor was behind a cloud the whole night was marked with a grey ribbon and its pegs were \
not moved, because, as Imre Sand wrote, a guess that looks like a measurement is worse than a hole in the \
page.

The rule of the grey ribbon was broken once. In the spring of the comet a visitor from the capital wanted \
to see the board at work, and it was moved for his pleasure under a thin haze. Eleven pegs changed. It \
took until the summer to find out that none of those eleven stars had changed at all, and in the meantime \
a table with their names had been printed in a journal. The correction is the longest entry of the whole \
logbook. It gives the names of the eleven stars, the name of the visitor, the thickness of the haze as \
well as it could be remembered, and ends with the sentence that was later painted over the door: Check it \
again, and say so.

Petra Holm left the village to study, and came back when she was thirty to take over the dome. She \
replaced the wooden pegs by brass ones, because the damp had swollen the holes, and she added a second \
board, on which the same stars were judged on the same night by somebody who had not seen the first. The \
two boards were kept in different rooms. Only on the first Sunday of each month were they carried together \
and compared, peg by peg, with the whole village looking on and a cake for whoever had been wrong the \
least often. Where the two boards agreed, the number went into the catalogue. Where they did not, both \
numbers went in, side by side, with the names of the people who had made them.

Summarise this logbook in one short paragraph."""
