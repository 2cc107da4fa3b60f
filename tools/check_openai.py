"""Generates and edits images of a server (`maxdiffusion serve`) with OpenAI's package as the client.

PYTHONPATH=.deps/interop python3 tools/check_openai.py http://127.0.0.1:PORT KEY FOLDER

FOLDER has photo.png and mask.png; generated.png, url.png and edited.png are written there. Fails if an answer does
not match the package's types.
"""
import base64, os, sys, urllib.request

import openai


def main(address, key, folder):
    def path(name):
        return os.path.join(folder, name)

    def write(name, data):
        with open(path(name), 'wb') as f:
            f.write(data)

    client = openai.OpenAI(base_url=address + '/v1', api_key=key, max_retries=0)
    names = [m.id for m in client.models.list()]
    print('models:', ', '.join(names))
    made = client.images.generate(model=names[0], prompt='a red heart', n=2, size='16x16', response_format='b64_json',
                                  extra_body={'seed': 5, 'scheduler': 'euler'})
    assert len(made.data) == 2 and made.created > 0
    write('generated.png', base64.b64decode(made.data[0].b64_json))
    made = client.images.generate(model=names[0], prompt='a red heart', size='16x16', extra_body={'seed': 5, 'scheduler': 'euler'})
    with urllib.request.urlopen(made.data[0].url) as answer:
        write('url.png', answer.read())
    with open(path('photo.png'), 'rb') as photo, open(path('mask.png'), 'rb') as mask:
        made = client.images.edit(model=names[0], image=photo, mask=mask, prompt='a hat', response_format='b64_json',
                                  extra_body={'seed': 3})
    write('edited.png', base64.b64decode(made.data[0].b64_json))
    for wrong, kind in ((dict(model='none'), openai.BadRequestError), (dict(model=names[0], size='9999x9999'), openai.BadRequestError)):
        try:
            client.images.generate(prompt='x', **wrong)
        except kind as e:
            print('refused:', e.body['message'])
        else:
            sys.exit(f'FAILED {wrong}: not refused')
    try:
        openai.OpenAI(base_url=address + '/v1', api_key='wrong', max_retries=0).models.list()
    except openai.AuthenticationError as e:
        print('refused:', e.body['message'])
    else:
        sys.exit('FAILED: a wrong key is not refused')
    print('ok')


if __name__ == '__main__':
    main(*sys.argv[1:])
