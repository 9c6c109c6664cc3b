"""Questions on documentation that ships with Python, and multi-hop questions on invented facts.

The code names only fragments of the documentation; the text is read when the bench runs.
"""

from typing import Final, NamedTuple


class AskedSentence(NamedTuple):
    """A question and the beginning of the sentence that answers it."""

    source: str
    """A topic of `pydoc_data.topics`, or a module whose docstring it is."""
    gold: str
    question: str


class Hops(NamedTuple):
    """A question that needs two passages; the second is about what the first names."""

    first: str
    """Title, a bar, sentences; the one that is needed begins with a star."""
    second: str
    question: str


ENGLISH: Final = (
    AskedSentence("assignment", "A list of the remaining items in the iterable is then assigned", "When a starred target appears in an assignment, what does it receive?"),
    AskedSentence("async", 'Functions defined with "async def" syntax are always coroutine', "Is a function written with async def still a coroutine if it never awaits anything?"),
    AskedSentence("attribute-access", "The default behavior for attribute access is to get, set, or delete", "What happens by default when an attribute of an object is read or deleted?"),
    AskedSentence("attribute-access", 'The "__dir__" function should accept no arguments', "What must a module's __dir__ function return?"),
    AskedSentence("binary", "In the former case, the numbers are converted to a common type", "How are two numbers treated before they are multiplied?"),
    AskedSentence("calls", "Elements from these iterables are treated as if they were additional", "How does a call treat the elements of an unpacked iterable?"),
    AskedSentence("class", "The order in which attributes are defined in the class body is preserved", "Where is the order of definitions in a class body preserved?"),
    AskedSentence("compound", "If every key given in the mapping pattern is present in the subject", "When does a mapping pattern succeed?"),
    AskedSentence("compound", 'This means that multiple "except*" clauses can execute', "Can more than one except* clause run for the same exception group?"),
    AskedSentence("customization", "If this is not possible, a string of the form", "What should __repr__ return if no valid Python expression can be given?"),
    AskedSentence("customization", "This is typically used for debugging, so it is important", "Why should a representation be information-rich and unambiguous?"),
    AskedSentence("debugger", 'If you use the "silent" command in the command list', "Which pdb command suppresses the usual message about stopping at a breakpoint?"),
    AskedSentence("debugger", "The exclamation point can be omitted unless", "In the debugger, when may the exclamation point not be left out?"),
    AskedSentence("execmodel", 'The "except" clause is selected depending on the class', "What decides which except clause handles an exception?"),
    AskedSentence("formatstrings", "The replacement fields within the format_spec are substituted before", "Are nested replacement fields substituted before or after the format_spec is interpreted?"),
    AskedSentence("function", "A function call always assigns values to all parameters", "Where can the values of parameters mentioned in the parameter list come from?"),
    AskedSentence("identifiers", "These names are defined by the interpreter and its implementation", "Who defines the system-defined dunder names?"),
    AskedSentence("import", "When a module or package is contained within another package it is possible", "When may a relative import be used without mentioning the package name?"),
    AskedSentence("naming", "If a name is bound in a block, it is a local variable of that block", "When is a name that is bound in a block not a local variable?"),
    AskedSentence("numeric-types", "If a specific method is not defined, the augmented assignment falls back", "What do augmented assignments use if the in-place method is missing?"),
    AskedSentence("numeric-types", "If one of those methods does not support the operation with the supplied", "What should a numeric method return if it cannot handle the supplied arguments?"),
    AskedSentence("objects", "Do not depend on immediate finalization of objects", "Why should files always be closed explicitly?"),
    AskedSentence("operator-summary", "Note that comparisons, membership tests, and identity tests", "Which tests share the same precedence and chain from left to right?"),
    AskedSentence("operator-summary", 'The function "math.fmod()" returns a result whose sign', "Whose sign does the result of math.fmod have?"),
    AskedSentence("raise", "If it is a class, the exception instance will be obtained", "How is the instance obtained when raise is given an exception class?"),
    AskedSentence("sequence-types", 'Note: "for" loops expect that an "IndexError" will be raised', "Which exception lets a for loop detect the end of a sequence?"),
    AskedSentence("sequence-types", "This method should return a new iterator object", "What should a container's __iter__ method return?"),
    AskedSentence("specialnames", "A rich comparison method may return the singleton", "Which singleton may a rich comparison method return?"),
    AskedSentence("string-methods", "This means that characters like digraphs will only have", "What happens to digraphs when a string is capitalized?"),
    AskedSentence("string-methods", "This covers digits which cannot be used to form numbers in base 10", "Which ancient numbers are an example of digits that cannot form base 10 numbers?"),
    AskedSentence("string-methods", "Casefolding is similar to lowercasing but more aggressive", "How does casefolding differ from lowercasing?"),
    AskedSentence("strings", "New in version 3.3: Support for the unicode legacy literal", "In which version was the unicode legacy literal reintroduced?"),
    AskedSentence("try", "If an exception occurs in any of the clauses and is not handled", "What happens to an exception that no clause handles while finally still has to run?"),
    AskedSentence("types", "Python doesn’t have a char type; instead", "Does Python have a char type?"),
    AskedSentence("types", "A traceback object is implicitly created when an exception occurs", "When are traceback objects created implicitly?"),
    AskedSentence("typesmapping", "Iterating views while adding or deleting entries", "What can go wrong when entries are added to a dictionary during iteration over a view?"),
    AskedSentence("typesmapping", "An equality comparison between one", "What does comparing two dict.values() views for equality give?"),
    AskedSentence("typesmapping", "If a key occurs more than once, the last value", "If the same key occurs twice when a dictionary is built, which value wins?"),
    AskedSentence("typesseq", "Ranges do support negative indices", "How are negative indices of a range interpreted?"),
    AskedSentence("typesseq-mutable", 'The "reverse()" method modifies the sequence in place', "Why does reverse() work in place?"),
    AskedSentence("with", "If the return value was true, the exception is suppressed", "When does a with statement suppress an exception?"),
    AskedSentence("heapq", "These two make it possible to view the heap as a regular Python list", "Which element of the heap list is the smallest item?"),
    AskedSentence("random", "* The random() method is implemented in C", "Is random() threadsafe, and why?"),
    AskedSentence("csv", "csv.QUOTE_NONNUMERIC means that quotes are always placed", "Which csv constant places quotes around fields that do not parse as numbers?"),
    AskedSentence("difflib", "Function restore(delta, which)", "Which function gives back one of the two sequences behind an ndiff delta?"),
    AskedSentence("shelve", 'The difference with "dbm" databases', "How does a shelf differ from dbm databases?"),
    AskedSentence("copy", "- A deep copy constructs a new compound object and then, recursively", "What does a deep copy insert into the new compound object?"),
    AskedSentence("tokenize", "Additionally, all token lists start with an ENCODING token", "With which token does every token list start?"),
    AskedSentence("sched", "Each instance is parametrized with two functions", "Which two functions is a scheduler instance parametrized with?"),
    AskedSentence("configparser", "When `inline_comment_prefixes` is given", "What is inline_comment_prefixes used for?"),
    AskedSentence("urllib.request", "The HTTPRedirectHandler automatically deals with", "Which handler deals with HTTP 301 and 302 errors?"),
    AskedSentence("http.cookiejar", "This module has (now fairly distant) origins in", "Which Perl module did http.cookiejar descend from?"),
    AskedSentence("cmd", "The `completedefault' method may be overridden", "Which method can be overridden to intercept completions?"),
    AskedSentence("argparse", "- ArgumentError -- The exception raised by ArgumentParser", "Which exception do ArgumentParser objects raise for errors with the parser's actions?"),
    AskedSentence("subprocess", "This module allows you to spawn processes", "Which module lets you spawn processes and obtain their return codes?"),
)  # fmt: skip

HOPS: Final = (
    Hops("Tarnow Viaduct|The viaduct crosses the gorge in nine spans. *Its designer was the engineer Lucia Ferro. Trains have used it since 1904.", "Lucia Ferro|She studied hydraulics before turning to bridges. *Lucia Ferro was born in Oristano in 1871. Her drawings are kept in Cagliari.", "In which town was the engineer who designed the Tarnow Viaduct born?"),
    Hops("Blue Heron Quartet|The quartet recorded eleven albums. *Its cellist for twenty years was Marek Dolan. Critics praised the group's Haydn.", "Marek Dolan|He gave his first recital at fourteen. *Marek Dolan played an instrument made in Cremona in 1712. He retired to the coast.", "Which year was the instrument made that the cellist of the Blue Heron Quartet played?"),
    Hops("Kestrel Mine|The mine lies above the tree line. *The ore from Kestrel Mine was shipped through the port of Vellamo. Work stopped in winter.", "Vellamo|Fishing boats crowd the inner basin. *The harbour master of Vellamo in those years was Ida Strand. A lighthouse marks the reef.", "Who was harbour master of the port that shipped the ore of Kestrel Mine?"),
    Hops("The Glass Orchard|The novel has three narrators. *The Glass Orchard was translated into English by Noor Haddad. It won no prize at first.", "Noor Haddad|She wrote essays on Andalusian poetry. *Noor Haddad taught at the University of Leiden until 1998. She kept bees.", "At which university did the English translator of The Glass Orchard teach?"),
    Hops("Sable Island ferry|The ferry runs four times a day. *The vessel used on the Sable Island route is the Margit. Tickets are sold on board.", "Margit (ship)|The hull is painted green. *The Margit was built at the Halmstad yard in 1966. Her engines were replaced twice.", "At which yard was the ship of the Sable Island ferry built?"),
    Hops("Orlen Prize|The prize is given every second autumn. *In 2011 the Orlen Prize went to the chemist Tomas Abel. The medal is silver.", "Tomas Abel|As a boy he collected minerals. *Tomas Abel discovered the pigment called veridian slate. He never patented it.", "Which pigment was discovered by the winner of the 2011 Orlen Prize?"),
    Hops("Fort Cassel|The fort guards the river's mouth. *The garrison of Fort Cassel was commanded by Captain Ruiz. Its cannons are gone.", "Captain Ruiz|He came from a family of printers. *Captain Ruiz later wrote a treatise on tides. It was reprinted often.", "On which subject did the commander of Fort Cassel later write?"),
    Hops("Hollin Observatory|The dome turns on cannonballs. *The main telescope of Hollin Observatory was paid for by Agnes Wray. It was installed in 1881.", "Agnes Wray|She inherited a wool mill. *Agnes Wray made her fortune with waterproof cloth. A street bears her name.", "With what did the donor of the Hollin Observatory telescope make her fortune?"),
    Hops("Pavonia Marathon|The course follows the old canal. *The first Pavonia Marathon was won by Elio Brandt. Water is handed out every five kilometres.", "Elio Brandt|He trained on mountain paths. *Elio Brandt worked as a postman in Lugano. His shoes are in the museum.", "What was the occupation of the winner of the first Pavonia Marathon?"),
    Hops("Willow Street Bakery|The bakery opens at five. *The rye recipe of Willow Street Bakery came from Hanne Moller. People queue on Saturdays.", "Hanne Moller|She arrived with two suitcases. *Hanne Moller learned baking in Odense from her uncle. She disliked raisins.", "In which city did the woman behind the Willow Street Bakery rye recipe learn baking?"),
    Hops("Amber Codex|The codex has 212 leaves. *The Amber Codex was restored by Giulia Penn. Its binding is modern.", "Giulia Penn|She worked with brushes of three hairs. *Giulia Penn kept her laboratory in an abandoned chapel in Siena. Students came from abroad.", "Where was the laboratory of the restorer of the Amber Codex?"),
    Hops("Lake Orsa regatta|The regatta is held in June. *The regatta's silver cup on Lake Orsa was donated by the Velde brewery. Sails must be white.", "Velde brewery|The brewery uses spring water. *The Velde brewery was founded by two sisters in 1839. It employs sixty people.", "Who founded the brewery that donated the cup of the Lake Orsa regatta?"),
)  # fmt: skip
