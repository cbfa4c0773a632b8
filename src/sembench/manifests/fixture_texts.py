"""The documents of the fixture, written for it: eleven subjects, each with facts that a question can ask for.

Changing one character here changes the fixture's checksum, which a test pins: results on another fixture can't be
compared with older ones, so a change needs a new ``BENCHMARK_VERSION`` too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FixtureFact:
    """A question that the document answers, and the answer in the words of the text."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class FixtureText:
    """One document. ``held_out`` texts never become donors: negative controls are made of them."""

    name: str
    domain: str
    paragraphs: tuple[str, ...]
    facts: tuple[FixtureFact, ...]
    held_out: bool = False


TEXTS = (
    FixtureText(
        "ferry-rules",
        "operations",
        (
            "The Lowick ferry crosses the sound eleven times on a weekday and seven times on a Sunday. The first boat "
            "casts off at 05:40 from the slip below the fish market, because the bakers on the island want their "
            "yeast before the ovens are hot. A crossing takes twenty-six minutes in calm weather. When the wind "
            "stands above 34 knots for a quarter of an hour, the mate hoists a black ball and the timetable is "
            "suspended.",
            "Vehicles queue in four lanes painted on the quay. Lane three is kept for the doctor, the vet and anyone "
            "carrying ice; nobody else may stop there, not even to unload a passenger. The deck holds 18 cars, or six "
            "cars and two lorries, and the loading officer Ines Hallward decides who waits. Her decision is final "
            "until the ramp is up, and after that it is the captain's.",
            "Fares are charged by length, not by weight. A bicycle costs 2 crowns, a car 19, and a trailer as much as "
            "the car that pulls it. Islanders show a green card and pay half. The office keeps unclaimed luggage for "
            "ninety days in the shed behind the ticket window; umbrellas go to the school after thirty, since the "
            "shed would otherwise hold nothing else.",
            "Two engines drive the boat, and either can bring her home alone. The port engine was replaced in 2019 "
            "after a rope wound itself into the cooling pump, and its logbook therefore starts again at zero. The "
            "chief engineer reads both logbooks aloud to the relief crew on Mondays. He skips nothing, although the "
            "crew would like him to.",
            "In fog the ferry carries a second lookout at the bow with a brass handbell from the old Lowick church. "
            "Five strokes mean that something is ahead, two that it has passed. The bell was cast by the foundry of "
            "Marten Quill and cracked in the winter of 1963, so that its note is flat. Pilots say that they would "
            "know it anywhere, which is the point of a bell.",
        ),
        (
            FixtureFact("At what wind speed is the timetable suspended?", "34 knots"),
            FixtureFact("Who decides which vehicles wait on the quay?", "Ines Hallward"),
            FixtureFact("When was the port engine replaced?", "2019"),
        ),
    ),
    FixtureText(
        "seed-vault",
        "science",
        (
            "The regional seed vault occupies three rooms of a former railway tunnel, four kilometres from the "
            "nearest road that is ploughed in winter. Room A is held at minus eighteen degrees and stores the base "
            "collection; room B, a little warmer, serves requests; room C is for drying. Altogether 41,250 samples of "
            "barley, oats, peas and flax are kept, each in a laminated bag with a printed number and a pencilled one.",
            "Drying takes longer than freezing. Seeds arrive with about fourteen percent moisture and leave room C "
            "when five are left, usually after twenty-two days. If they are hurried, the coat splits and the sample "
            "is lost; Dr. Amara Okonjo, who directed the vault for sixteen years, used to say that the fastest way to "
            "kill a seed is to be helpful to it.",
            "Every tenth year a sample is woken. Two hundred seeds are laid on wet paper, and the sprouts are counted "
            "on the seventh and on the twelfth day. Below 85 percent the accession is grown out in the valley during "
            "the following summer and fresh seed replaces the old. The oldest bag that still passes holds a black oat "
            "collected near Tverrdal in 1938.",
            "Power comes from a small turbine on the stream above the tunnel and, when the stream freezes, from a "
            "diesel set that starts by itself. An outage of six hours raises room A by less than one degree because "
            "of the rock. The longest outage on record lasted fifty-one hours, after an avalanche took the line, and "
            "cost nothing but sleep.",
            "Requests are answered in the order of their postmark. A breeder receives fifty seeds of an accession, a "
            "school ten, and a museum a photograph. Nobody pays; everybody signs a sheet on which they promise to "
            "report what grew. About a third keep the promise, and the reports fill a cabinet that visitors find more "
            "moving than the freezers.",
        ),
        (
            FixtureFact("Below which germination share is an accession grown out again?", "85 percent"),
            FixtureFact("Who directed the vault for sixteen years?", "Amara Okonjo"),
            FixtureFact("When was the black oat near Tverrdal collected?", "1938"),
        ),
    ),
    FixtureText(
        "theatre-contract",
        "legal",
        (
            "This agreement is made between the town of Brenning, called the owner, and the Paper Moon Company, "
            "called the players. The owner lets the playhouse in Saddler Street with its stage, its two dressing "
            "rooms and the cellar below the trap. The term begins on 1 September and ends after 36 months, unless it "
            "is renewed in writing no later than the last day of the thirtieth month.",
            "The rent is 1,480 florins for every month in which a performance is given and a third of that sum for "
            "every other. It falls due on the tenth. The players insure costumes, instruments and scenery; the owner "
            "insures walls, roof and boiler. Damage from confetti is shared equally, a clause that both sides have "
            "asked to keep for reasons that are on file.",
            "No more than 212 people may be in the house, of whom 190 may be the audience. Before each performance "
            "the duty manager, Rosalind Achterberg or her deputy, walks the exits with a lit lamp and signs the red "
            "book. A performance that begins without her signature is a breach, and two breaches in one season "
            "entitle the owner to close the gallery.",
            "The players may build, paint and drill wherever the floor is marked with a white line. They may not load "
            "the grid above 900 kilograms, hang anything from the chandelier, or keep animals overnight, with the "
            "exception of the hen named in the schedule. At the end of the term they restore the cellar to the state "
            "shown in the photographs of annex two.",
            "Disputes go first to a mediator whom the chamber of crafts in Oudewater appoints within fifteen days. If "
            "the mediator fails, the court at Brenning decides under the law in force there. Notices are valid when "
            "handed over in person, or on the third day after registered posting. Electronic mail suffices only for "
            "the weekly programme and for apologies.",
        ),
        (
            FixtureFact("How many people may be in the house?", "212"),
            FixtureFact("Who signs the red book before a performance?", "Rosalind Achterberg"),
            FixtureFact("What load may the grid carry?", "900 kilograms"),
        ),
    ),
    FixtureText(
        "printer-incident",
        "incident",
        (
            "On 14 March the label printers of the northern warehouse stopped within nine minutes of each other. The "
            "first ticket, opened at 07:12 by shift lead Tomasz Wierzba, mentioned a jam on line two; by 07:21 all "
            "thirteen lines had reported the same and parcels were standing unlabelled on every belt. Outbound "
            "traffic fell from 2,300 parcels an hour to fewer than forty, which two people wrote by hand.",
            "The cause was a certificate. A renewal job had replaced the chain on the print gateway at midnight, but "
            "the printers keep sessions open for seven hours and noticed the new chain only when they reconnected. "
            "Their firmware, build 8.14, trusts a list that was burned in at the factory and does not contain the new "
            "issuer. Each printer retried four times, then went into a safe mode with a blinking amber light.",
            "Recovery took two steps. At 08:05 the gateway was moved back to the old chain, which was still valid for "
            "nineteen days, and half of the printers returned by themselves. The others had to be switched off at the "
            "wall, since safe mode ignores the network. The last line printed at 08:47. The backlog of 3,610 parcels "
            "was gone before the late truck left.",
            "Monitoring saw nothing. The gateway answered its health check throughout, because the check speaks plain "
            "HTTP and never shows a certificate. A second alert, on printed labels per minute, had been muted during "
            "the January stocktaking and nobody had switched it on again. The review found three more alerts in the "
            "same state, the oldest muted for 412 days.",
            "Follow-up: a probe that connects exactly as a printer does, owned by the gateway team; a limit of "
            "fourteen days on every mute; firmware 8.20 on all lines before the old chain expires. Priya Raghunathan "
            "will report on the three items at the April meeting. Writing labels by hand is now part of the fire "
            "drill, and the good pens are kept beside the extinguisher.",
        ),
        (
            FixtureFact("Which firmware build runs on the printers?", "8.14"),
            FixtureFact("How many parcels were in the backlog?", "3,610"),
            FixtureFact("Who reports on the follow-up at the April meeting?", "Priya Raghunathan"),
        ),
    ),
    FixtureText(
        "clinic-handbook",
        "health",
        (
            "The walk-in clinic on Harrow Lane is open from eight to twenty hours, including holidays. Nurses see "
            "everyone within twelve minutes of arrival and sort them by colour: red at once, amber within half an "
            "hour, green when there is time. A patient who grows worse in the waiting room tells the desk by raising "
            "the paddle that hangs beside each chair; speaking is not required, and often not possible.",
            "Blood is drawn in cabins four and five. A fasting sample needs ten hours without food, though water is "
            "allowed and black tea is forgiven. Tubes travel to the laboratory by a pneumatic line at six metres a "
            "second, fast enough that a badly closed tube paints the whole carrier. Results reach the doctor after 50 "
            "minutes, those of the thyroid on the next working day.",
            "The pharmacy cupboard is locked with two keys that never hang on the same belt. Anything counted is "
            "counted aloud by two people, at the change of every shift, and the number is written before it is "
            "believed. In the year 2021 the count differed on three evenings; each time the missing ampoule was found "
            "in the pocket of a coat belonging to Dr. Leopold Anz.",
            "Wounds are cleaned with saline at body warmth. Stitches on the face come out after five days, on the "
            "scalp after eight, over a joint after fourteen. Nobody leaves without a sheet that says when to return "
            "and which signs cannot wait: fever above 38.6 degrees, red streaks, numb fingers. The sheet exists in "
            "eleven languages and in pictures.",
            "Students are welcome on Tuesdays and Thursdays. They introduce themselves, ask before they touch, and "
            "wash as long as it takes to hum the chorus on the poster. The poster was drawn by the daughter of the "
            "head nurse, Beatriz Lamego, and shows a crocodile with a brush. It has been stolen twice and returned "
            "once with thanks.",
        ),
        (
            FixtureFact("After how many minutes do results reach the doctor?", "50 minutes"),
            FixtureFact("Which fever cannot wait?", "38.6 degrees"),
            FixtureFact("Who is the head nurse?", "Beatriz Lamego"),
        ),
    ),
    FixtureText(
        "observatory-budget",
        "finance",
        (
            "The council of the Hexham observatory closed its books with a surplus of 27,400 pounds, the first in six "
            "years. Income rose by nine percent, mostly from the night school, whose winter course sold out in a "
            "single weekend. Donations fell, as the treasurer Oswin Pell had foretold, because the dome no longer "
            "leaks and people give more readily to a bucket than to a roof.",
            "Salaries remain the largest item at 318,000 pounds for seven posts, one of them vacant since Michaelmas. "
            "Electricity came next and was overspent by a fifth; the new camera wants cooling by day as well as by "
            "night. The council approved a heat pump on the condition that it stands on the north side, where its hum "
            "cannot be mistaken for rain.",
            "The mirror goes to Jena in the spring for a fresh coat of aluminium. The work costs 46,900 pounds "
            "including carriage, of which the foundation of Lady Corisande Vane pays half. During the eleven weeks of "
            "its absence visitors will be shown the empty cell, at a reduced price, and the smaller telescope in the "
            "orchard.",
            "Reserves stand at fourteen weeks of running costs. The auditors would like twenty-six. A plan to get "
            "there by 2031 was adopted by five votes to two; it relies on letting the library for weddings, which the "
            "two opposed on the ground that rice and star charts do not belong in the same room. The charts will be "
            "moved.",
            "Three risks are recorded. The lease of the access track ends in eighteen months and the farmer is "
            "selling. The insurance excludes lightning, an odd exclusion for the tallest building on a hill. And the "
            "only person who understands the clock drive is eighty-one, cheerful, and unwilling to write anything "
            "down. A student with a film camera has been engaged.",
        ),
        (
            FixtureFact("How large was the surplus?", "27,400 pounds"),
            FixtureFact("What does the work on the mirror cost?", "46,900 pounds"),
            FixtureFact("Who is the treasurer?", "Oswin Pell"),
        ),
    ),
    FixtureText(
        "bee-manual",
        "agriculture",
        (
            "A hive is opened when the air is warmer than fifteen degrees and the bees are flying, never to satisfy a "
            "visitor. Smoke is blown across the entrance three times; then one waits, which beginners forget. The lid "
            "is laid upside down on the grass and the boxes are set on it crosswise, so that few bees are crushed and "
            "the stack can be rebuilt in the dark.",
            "The association's yard at Kestrel Bank has 57 colonies in four rows. Row one belongs to the queens bred "
            "from the line of Magda Sorensen, gentle and poor at finding lime trees; row four is anything that was "
            "caught in a chimney. Between them stand the experiments. Each colony has a slate on which the last "
            "visitor leaves three words and a date.",
            "Honey is taken when four fifths of a comb is sealed. An average summer gives 23 kilograms a colony, a "
            "good one forty, and the year of the long rain gave six, all of it from ivy and hard as soap. The "
            "extractor is cranked by hand at first and by motor only when the combs have lost their weight; otherwise "
            "they break, and the floor is sticky until October.",
            "Mites are counted on the last Saturday of July. A board lies under the mesh for three days, and when "
            "more than 30 mites have fallen the colony is treated in the same week with acid vapour. Treatment is "
            "done at dusk with a mask, by two members, one of whom has done it before. The counts since 2008 hang in "
            "the shed and tell an honest story.",
            "Swarms are collected free of charge from anyone who telephones before noon. The caller is asked how high "
            "it hangs, whether a ladder would stand, and if there is a dog. Ewan Tolliver keeps the list of "
            "collectors and the straw skep that was his grandmother's. Most swarms weigh two kilograms and fit a "
            "cardboard box, provided that the box is not the one for the hats.",
        ),
        (
            FixtureFact("How many colonies stand at Kestrel Bank?", "57"),
            FixtureFact("How much honey does an average summer give?", "23 kilograms"),
            FixtureFact("Who keeps the list of collectors?", "Ewan Tolliver"),
        ),
    ),
    FixtureText(
        "archive-migration",
        "software",
        (
            "The map archive moved to the new storage service between May and August. At the start it held 8.9 "
            "million tiles and 140,000 scans, spread over eleven servers that had been bought one at a time, each "
            "with the leftover money of a different year. The scans were copied first because they cannot be made "
            "again; tiles can be drawn from the survey data at a cost of about nine days.",
            "A copy counted as finished only after it had been read back and its checksum compared. That rule doubled "
            "the traffic and found 317 damaged files, all on one server whose memory had been failing quietly since "
            "the spring before. For 306 of them a good copy existed on tape. The remaining eleven are listed in the "
            "appendix with what is known about their content.",
            "Readers noticed little. For six weeks every request went to both systems, and a comparison job led by "
            "Noor Fakhoury logged each difference in size, type or date. Two classes of difference survived review: "
            "old tiles carry a comment with the name of the drawing program, and dates before 1970 had been rounded "
            "to that year by the old file system.",
            "The switch happened on a Thursday at ten in the morning, on purpose: everyone was present, rested, and "
            "able to go back. Going back was rehearsed twice and took fourteen minutes. It was not needed. Response "
            "times at the ninety-fifth percentile fell from 840 milliseconds to 210, chiefly because the new service "
            "keeps an index in memory.",
            "Costs are lower than planned by 12 percent, since cold scans live on slower disks after sixty days. The "
            "old servers were wiped, photographed and given to the technical school in Varde. One of them still "
            "carries the label 'do not switch off, Henrik knows why'. Henrik Dalgaard retired years ago; asked by "
            "telephone, he did not know either.",
        ),
        (
            FixtureFact("How many damaged files were found?", "317"),
            FixtureFact("Who led the comparison job?", "Noor Fakhoury"),
            FixtureFact("By how much are costs lower than planned?", "12 percent"),
        ),
    ),
    FixtureText(
        "bridge-survey",
        "engineering",
        (
            "The stone bridge over the Tarn at Ellery was surveyed from a raft, a ladder and, where neither would do, "
            "from the baskets of a cherry picker lent by the orchard. It has five arches, of which the second from "
            "the west is a rebuild of 1794 and visibly rounder than its neighbours. Spans vary between 9.4 and 11.2 "
            "metres.",
            "Mortar was sampled at sixty points. Above the flood line it is sound; below, it can be scratched out "
            "with a key in nineteen places, and upstream of the third pier a hand fits into the joint. The surveyor, "
            "Gwendolyn Marsh, advises lime and patience. Cement was used there in the seventies and has broken the "
            "stones it was meant to hold.",
            "Traffic was counted during a market week: 6,120 cars, 48 tractors, and one circus. The parapet shows "
            "scrapes at the height of a lorry's mirror on both sides of the crown. A limit of 7.5 tonnes is proposed, "
            "together with a mirror at the inn, so that drivers see each other before they meet in the middle.",
            "Swifts nest in the putlog holes on the south face from May until the end of July, and no scaffold may "
            "stand there in that time. Repairs are therefore planned in two seasons. The first is priced at 83,000 "
            "and covers the piers; the second waits for a second price, because nobody has yet seen the inside of the "
            "eastern abutment.",
        ),
        (
            FixtureFact("Which weight limit is proposed?", "7.5 tonnes"),
            FixtureFact("Who is the surveyor?", "Gwendolyn Marsh"),
        ),
        held_out=True,
    ),
    FixtureText(
        "tea-auction",
        "trade",
        (
            "Lots are shown on long tables in the order of their gardens, leaf in tin lids, liquor in white cups. "
            "Buyers walk, slurp and spit for about three hours. What they think is not said; it can be guessed from "
            "how long a thumb rests in the leaf. On the day described here 740 lots were offered, most of them from "
            "the second flush.",
            "The auctioneer, Yusuf Barakzai, sells four lots a minute and never repeats a price. Bids are made with a "
            "pencil held upright. A lot that finds no bid within six seconds is passed and may be asked for again "
            "after the lunch of rice and pickles, when the room is kinder and prices are lower.",
            "The best price, 61 rupees a kilogram above the day's mean, went to a garden that had lost its road in "
            "the rains and carried every chest out by mule. Two blenders bid against each other for it until one laid "
            "the pencil down. Dust and fannings sold quickly to the bottlers, who taste nothing and weigh everything.",
            "Payment falls due on the fourteenth day, delivery on receipt of payment. Chests that are short by more "
            "than 300 grams are opened before two witnesses. The warehouse keeps a cat for the mice and a barometer "
            "for the tea, and in the books both appear under the same heading.",
        ),
        (
            FixtureFact("How many lots were offered?", "740"),
            FixtureFact("Who is the auctioneer?", "Yusuf Barakzai"),
        ),
        held_out=True,
    ),
    FixtureText(
        "choir-minutes",
        "association",
        (
            "Present were thirty-eight singers, the conductor and, for item four, the landlord. Minutes of the last "
            "meeting were read by Ottilie Krantz and accepted with one correction: the tenors had not been late, they "
            "had been parked in. The correction was carried against the votes of the altos.",
            "The spring tour leads to three towns in nine days. Rooms are booked for 44 people including the drivers. "
            "Those who snore have entered themselves on a list, others have been entered; the list is closed. Each "
            "singer pays 265 euros before the end of February, in two parts if that is easier.",
            "New folders were tried and found too stiff for the encores. The old ones stay until the spines give way. "
            "The piano in the parish hall has been tuned to 438 hertz by somebody who meant well, and rehearsals move "
            "to the school until the tuner returns from his honeymoon on the nineteenth.",
            "The landlord asked that the second basses stop tapping the floor in six-eight time, since the plaster "
            "below has begun to follow. Felt slippers were proposed, priced at eleven euros a pair, and adopted with "
            "applause that could not be heard downstairs.",
        ),
        (
            FixtureFact("For how many people are rooms booked?", "44"),
            FixtureFact("Who read the minutes of the last meeting?", "Ottilie Krantz"),
        ),
        held_out=True,
    ),
)
